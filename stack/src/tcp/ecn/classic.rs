//! RFC 3168: a mark is echoed by ECE until CWR arrives.

use super::Carrier;
use crate::base::Counter;
use crate::tcp::Tcb;
use crate::tcp::contract::{EcnField, Env};
use crate::tcp::input::Segment;
use crate::wire::tcp::Flags;

/// Both halves of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Classic {
    /// A mark has arrived, and no CWR since: ACKs carry ECE.
    echoes: bool,
    /// The window was reduced: the next new data carries CWR.
    pub cwr_due: bool,
}

impl Classic {
    pub(super) const fn new() -> Classic {
        Classic { echoes: false, cwr_due: false }
    }

    /// ECE, and CWR of new data.
    pub(super) fn flags(&self, carrier: Carrier) -> Flags {
        let ece = if self.echoes { Flags::ECE } else { Flags::default() };
        let cwr =
            if self.cwr_due && carrier == Carrier::NewData { Flags::CWR } else { Flags::default() };
        ece | cwr
    }

    pub(super) fn on_sent(&mut self, carrier: Carrier) {
        self.cwr_due &= carrier != Carrier::NewData;
    }
}

impl Tcb {
    /// A mark counts only on data in the window (section 6.1.5), and the first one is acknowledged at
    /// once.
    pub(super) fn process_classic_ecn(&mut self, env: &mut Env, seg: &Segment) {
        let classic = &mut self.ecn.classic;
        if !seg.payload.is_empty() {
            if seg.hdr.flags.contains(Flags::CWR) {
                classic.echoes = false;
            }
            if seg.ecn == EcnField::Ce {
                env.counters.count(Counter::TcpEcnMarksIn);
                self.ecn.received.note_packets(1);
                self.due.ack |= !classic.echoes;
                classic.echoes = true;
            }
        }
        if seg.hdr.flags.contains(Flags::ECE) {
            env.counters.count(Counter::TcpEcnEchoesIn);
            self.on_ecn_marks(env);
        }
    }
}
