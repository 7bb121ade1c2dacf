//! The receive side of the device link: the burst, what joins and looks up its frames, and how threads wait
//! for the next one.

use fulmar_netdev::Burst;
use fulmar_netdev::gro::Gro;
use fulmar_netdev::moderation::Moderation;

use crate::config::StackConfig;
use crate::demux::Foresight;

/// Frames taken from the device in one burst at most.
pub const RX_BATCH: usize = 64;

/// Frames on their way from the device.
pub struct Rx {
    pub burst: Burst,
    /// Joins the segments of a burst; `None`: they stay apart.
    pub gro: Option<Gro>,
    /// Look-ups of the burst that is being handled.
    pub foresight: Foresight,
    /// Mean bytes of the frames of the last burst.
    pub frame_bytes: usize,
    /// How threads wait for the device.
    pub moderation: Moderation,
    /// The last poll left nothing in the device, as far as is known.
    pub is_dry: bool,
}

impl Rx {
    pub fn new(config: &StackConfig) -> Rx {
        Rx {
            burst: Burst::with_capacity(RX_BATCH),
            gro: config.gro.then(Gro::new),
            foresight: Foresight::default(),
            frame_bytes: 0,
            moderation: Moderation::new(config.moderation),
            is_dry: true,
        }
    }
}
