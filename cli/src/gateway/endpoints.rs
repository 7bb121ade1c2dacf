//! The control socket and the listener for metrics of a gateway: opened before the containment, served by threads after
//! it.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use fulmar::stat::control::{Bound, Control};
use fulmar_gateway::netns::Netns;

use super::document::About;
use super::log::Log;
use super::snapshot::Snapshots;
use crate::failure::Outcome;
use crate::metrics;

/// The endpoints, bound and not served yet.
pub struct Endpoints {
    control: Option<Bound>,
    metrics: Option<metrics::Bound>,
    /// Inode of the network namespace of the host's sockets.
    host_namespace: Option<u64>,
}

/// Served endpoints: they are closed when this is dropped.
pub struct Served {
    _control: Option<Control>,
}

impl Endpoints {
    /// Opens the control socket and, if one is wanted, the listener for metrics, in the host's namespaces. A gateway
    /// works without the control socket, too.
    ///
    /// # Errors
    /// The address for metrics is in use, or not the host's.
    pub fn open(metrics: Option<SocketAddr>, log: &Log) -> Outcome<Endpoints> {
        let metrics = metrics.map(metrics::Bound::new).transpose()?;
        let control = Bound::new();
        if let Err(e) = &control {
            log.say(&format!(
                "cannot open the control socket, so `fulmar stat` does not list this gateway: {e}"
            ));
        }
        let host_namespace = Netns::current().ok().and_then(|own| inode_of(&own));
        Ok(Endpoints { control: control.ok(), metrics, host_namespace })
    }

    /// The inodes of the network namespaces of the host and of the guest.
    pub fn namespaces(&self, guest: &Netns) -> [Option<u64>; 2] {
        [self.host_namespace, inode_of(guest)]
    }

    /// Closes the listener for metrics later.
    pub fn closer(&self) -> Option<metrics::Closer> {
        self.metrics.as_ref().map(metrics::Bound::closer)
    }

    /// Starts the threads that answer, as contained as the calling one. `None`, and a message: there are none.
    pub fn serve(self, about: About, snapshots: Snapshots, log: &Log) -> Option<Served> {
        let failed = |e: &io::Error| {
            log.fail(&format!(
                "cannot start the thread that answers `fulmar stat` and --metrics: {e}"
            ));
        };
        self.start(about, snapshots).inspect_err(failed).ok()
    }

    fn start(self, about: About, snapshots: Snapshots) -> io::Result<Served> {
        let about = Arc::new(about);
        if let Some(metrics) = self.metrics {
            let (about, snapshots) = (Arc::clone(&about), snapshots.clone());
            metrics.serve(move || {
                let (document, flows) = about.document(*snapshots.take()?);
                Some(metrics::exposition(&document, &flows))
            })?;
        }
        let document = move || about.text(*snapshots.take()?);
        let control = self.control.map(|bound| bound.serve(document)).transpose()?;
        Ok(Served { _control: control })
    }
}

/// The inode of a network namespace, by which the kernel tells it from others.
fn inode_of(netns: &Netns) -> Option<u64> {
    let file = File::from(netns.as_fd().try_clone_to_owned().ok()?);
    file.metadata().ok().map(|m| m.ino())
}
