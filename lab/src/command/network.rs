//! Which stack netperf's two ends run on.

use clap::ValueEnum;
use fulmar::NeighbourState;
use fulmar_cli::device::{Session, StackArgs};
use fulmar_cli::failure::Outcome;
use fulmar_lab::netperf::socket::{Network, OnFulmar, OnKernel};
use std::net::IpAddr;
use std::sync::Arc;

/// The options.
#[derive(clap::Args, Clone, Debug)]
pub struct NetworkArgs {
    /// Whose sockets: fulmar's, or this machine's kernel's (which needs no device)
    #[arg(long = "stack", value_enum, default_value_t = Which::Fulmar)]
    which: Which,
    #[command(flatten)]
    stack: StackArgs,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Which {
    Fulmar,
    Kernel,
}

/// A stack in use.
pub struct Opened {
    /// Its sockets.
    pub network: Arc<dyn Network>,
    session: Option<Session>,
}

impl NetworkArgs {
    /// Opens the device and builds the stack, if it is fulmar's.
    pub fn open(&self) -> Outcome<Opened> {
        self.open_as(false)
    }

    /// The same, for the end that is called.
    pub fn open_to_listen(&self) -> Outcome<Opened> {
        self.open_as(true)
    }

    /// Whether the stack runs over memory shared with one other process, and ends with it.
    pub fn is_shared_memory(&self) -> bool {
        self.which == Which::Fulmar && self.stack.is_shared_memory()
    }

    fn open_as(&self, listens: bool) -> Outcome<Opened> {
        if self.which == Which::Kernel {
            return Ok(Opened { network: Arc::new(OnKernel), session: None });
        }
        let session = self.stack.open_as(listens)?;
        let network = Arc::new(OnFulmar::new(session.stack().clone()));
        Ok(Opened { network, session: Some(session) })
    }
}

impl Opened {
    /// A neighbour that was asked for and has not answered: what is for it, or goes by it, has not left.
    pub fn silent_neighbour(&self) -> Option<IpAddr> {
        let stat = self.session.as_ref()?.stack().stat().ok()?;
        let is_silent = |s| matches!(s, NeighbourState::Incomplete | NeighbourState::Failed);
        stat.shard.neighbours.iter().find(|n| is_silent(n.state)).map(|n| n.ip)
    }

    /// Ends the stack: what was accepted is delivered.
    pub fn close(self) {
        drop(self.network);
        if let Some(session) = self.session {
            session.close();
        }
    }
}
