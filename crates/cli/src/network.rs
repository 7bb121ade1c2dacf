//! Which stack netperf's two ends run on.

use crate::device::{Session, StackArgs};
use crate::failure::Outcome;
use clap::ValueEnum;
use fulmar_lab::netperf::socket::{Network, OnFulmar, OnKernel};
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
        if self.which == Which::Kernel {
            return Ok(Opened { network: Arc::new(OnKernel), session: None });
        }
        let session = self.stack.open()?;
        let network = Arc::new(OnFulmar::new(session.stack().clone()));
        Ok(Opened { network, session: Some(session) })
    }
}

impl Opened {
    /// Ends the stack: what was accepted is delivered.
    pub fn close(self) {
        drop(self.network);
        if let Some(session) = self.session {
            session.close();
        }
    }
}
