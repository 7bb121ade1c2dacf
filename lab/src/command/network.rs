//! Which stack netperf's two ends run on.

use clap::ValueEnum;
use fulmar::{Cidr, NeighbourState, Stack};
use fulmar_cli::device::{Role, Session, StackArgs};
use fulmar_cli::failure::{Failure, Outcome};
use fulmar_lab::netperf::socket::{Network, OnFulmar, OnKernel};
use fulmar_nic::{FarEnd, SimConfig};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// The stack's address on the simulated NIC.
const FULMAR_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));

/// The options.
#[derive(clap::Args, Clone, Debug)]
pub struct NetworkArgs {
    /// Which stack's sockets: fulmar's, fulmar's on a simulated NIC, or this machine's kernel's (the last two need no
    /// device)
    #[arg(long = "stack", value_enum, default_value_t = Which::Fulmar)]
    which: Which,
    #[command(flatten)]
    stack: StackArgs,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Which {
    Fulmar,
    /// 10.77.0.2, with a simulated host behind the NIC: it has every other address, takes all that is sent to it
    /// and on port 19 sends without end
    Sim,
    Kernel,
}

/// A stack in use.
pub struct Opened {
    /// Its sockets.
    pub network: Arc<dyn Network>,
    stack: Option<Stack>,
    session: Option<Session>,
}

impl NetworkArgs {
    /// Opens the device and builds the stack, if it is fulmar's.
    pub fn open(&self) -> Outcome<Opened> {
        self.open_as(Role::Connects)
    }

    /// The same, for the end that is called.
    pub fn open_to_listen(&self) -> Outcome<Opened> {
        self.open_as(Role::Listens)
    }

    /// Whether the stack runs over memory shared with one other process, and ends with it.
    pub fn is_shared_memory(&self) -> bool {
        self.which == Which::Fulmar && self.stack.is_shared_memory()
    }

    fn open_as(&self, role: Role) -> Outcome<Opened> {
        let (stack, session) = match self.which {
            Which::Kernel => {
                return Ok(Opened { network: Arc::new(OnKernel), stack: None, session: None });
            }
            Which::Sim => (simulated()?, None),
            Which::Fulmar => {
                let session = self.stack.open_as(role)?;
                (session.stack().clone(), Some(session))
            }
        };
        let network = Arc::new(OnFulmar::new(stack.clone()));
        Ok(Opened { network, stack: Some(stack), session })
    }
}

/// A stack on a simulated NIC. The payload that the far end sends is generated, not what its buffers held before.
fn simulated() -> Outcome<Stack> {
    let far_end = FarEnd { verify: true, ..FarEnd::default() };
    let config = SimConfig { far_end, ..SimConfig::default() };
    let (device, _) = fulmar_nic::open(config).map_err(|e| Failure::new(e.to_string()))?;
    let address = Cidr { address: FULMAR_ADDRESS, prefix_len: 24 };
    Stack::builder()
        .device(device)
        .address(address)
        .build()
        .map_err(|e| Failure::new(e.to_string()))
}

impl Opened {
    /// A neighbour that was asked for and has not answered: what is for it, or goes by it, has not left.
    pub fn silent_neighbour(&self) -> Option<IpAddr> {
        let stat = self.stack.as_ref()?.stat().ok()?;
        let is_silent = |s| matches!(s, NeighbourState::Incomplete | NeighbourState::Failed);
        stat.shard.neighbours.iter().find(|n| is_silent(n.state)).map(|n| n.ip)
    }

    /// Ends the stack: what was accepted is delivered.
    pub fn close(self) {
        drop(self.network);
        drop(self.stack);
        if let Some(session) = self.session {
            session.close();
        }
    }
}
