//! How a gateway is looked into while it runs: what is opened before the containment, and the threads that answer
//! after it.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use fulmar::control::{Bound, Control};
use fulmar_netns::Netns;

use super::document::About;
use super::log::Log;
use super::snapshot::Snapshots;
use crate::failure::Outcome;
use crate::metrics;

/// What is bound and not served yet.
pub struct Visible {
    control: Option<Bound>,
    metrics: Option<metrics::Bound>,
    /// The network namespace of the host's sockets, as the kernel numbers it.
    host_namespace: Option<u64>,
}

/// Keeps the answers coming.
pub struct Answers {
    _control: Option<Control>,
}

impl Visible {
    /// Opens the control socket, without which a gateway works, too, and the listener for metrics if one is wanted.
    /// In the host's namespaces.
    ///
    /// # Errors
    /// The address for metrics is in use, or not the host's.
    pub fn open(metrics: Option<SocketAddr>, log: &Log) -> Outcome<Visible> {
        let metrics = metrics.map(metrics::Bound::new).transpose()?;
        let control = Bound::new();
        if let Err(e) = &control {
            log.say(&format!("`fulmar stat` will not see this gateway: {e}"));
        }
        let host_namespace = Netns::current().ok().and_then(|own| number_of(&own));
        Ok(Visible { control: control.ok(), metrics, host_namespace })
    }

    /// The network namespaces of the host and of the guest.
    pub fn namespaces(&self, guest: &Netns) -> [Option<u64>; 2] {
        [self.host_namespace, number_of(guest)]
    }

    /// What closes the listener for metrics.
    pub fn closer(&self) -> Option<metrics::Closer> {
        self.metrics.as_ref().map(metrics::Bound::closer)
    }

    /// Starts the threads that answer, as contained as the calling one.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn serve(self, about: About, snapshots: Snapshots) -> io::Result<Answers> {
        let document = Arc::new(move || snapshots.take().map(|stat| about.document(*stat)));
        if let Some(metrics) = self.metrics {
            let document = Arc::clone(&document);
            metrics.serve(move || {
                let document = serde_json::from_str(&document()?).ok()?;
                Some(metrics::exposition(&document))
            })?;
        }
        let control = self.control.map(|bound| bound.serve(move || document())).transpose()?;
        Ok(Answers { _control: control })
    }
}

/// The number that the kernel gives a network namespace.
fn number_of(netns: &Netns) -> Option<u64> {
    let file = File::from(netns.as_fd().try_clone_to_owned().ok()?);
    file.metadata().ok().map(|m| m.ino())
}
