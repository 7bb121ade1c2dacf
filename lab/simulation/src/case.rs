//! What names a simulation: everything that happens in it follows from its [`Case`].

use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// A dimension of the swarm. Each scenario of the swarm has a random subset of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Feature {
    /// Budgets down to a few blocks.
    SmallPools,
    /// A middlebox lowers the MSS option of each SYN.
    SmallSegments,
    /// Writers of small segments, whose readers pause for minutes.
    PausedReaders,
    /// Tens of connections.
    ManyFlows,
    /// Peers that never read and never close.
    ZeroWindows,
    /// SYNs from addresses that do not answer.
    SynFlood,
    /// ICMP errors that quote live connections.
    ForgedIcmp,
    /// Segments of live connections that TCP must not accept.
    ForgedSegments,
    /// ARP and neighbour discovery that move the peer's address elsewhere.
    ForgedNeighbours,
    /// Frames of the past.
    Replays,
    /// Packets for no socket, with arbitrary headers.
    Garbage,
    /// A clock that jumps forward.
    ClockJumps,
    /// ECN over a queue that marks, path MTU discovery by probes, keepalive, TCP_NOTSENT_LOWAT.
    Options,
    /// TCP Fast Open, with middleboxes that do not know it.
    FastOpen,
    /// ECN, with middleboxes that change its fields.
    EcnManglers,
    /// Middleboxes that remove options of SYNs.
    PathOptions,
    /// Programs that decide about pending connections before the SYN is answered.
    Pending,
    /// A station that answers for every address.
    AnyAddress,
    /// Ends that send files.
    Files,
}

impl Feature {
    /// Every feature, in the order of their bits.
    pub const ALL: [Feature; 19] = [
        Feature::SmallPools,
        Feature::SmallSegments,
        Feature::PausedReaders,
        Feature::ManyFlows,
        Feature::ZeroWindows,
        Feature::SynFlood,
        Feature::ForgedIcmp,
        Feature::ForgedSegments,
        Feature::ForgedNeighbours,
        Feature::Replays,
        Feature::Garbage,
        Feature::ClockJumps,
        Feature::Options,
        Feature::FastOpen,
        Feature::EcnManglers,
        Feature::PathOptions,
        Feature::Pending,
        Feature::AnyAddress,
        Feature::Files,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Feature::SmallPools => "small-pools",
            Feature::SmallSegments => "small-segments",
            Feature::PausedReaders => "paused-readers",
            Feature::ManyFlows => "many-flows",
            Feature::ZeroWindows => "zero-windows",
            Feature::SynFlood => "syn-flood",
            Feature::ForgedIcmp => "forged-icmp",
            Feature::ForgedSegments => "forged-segments",
            Feature::ForgedNeighbours => "forged-neighbours",
            Feature::Replays => "replays",
            Feature::Garbage => "garbage",
            Feature::ClockJumps => "clock-jumps",
            Feature::Options => "options",
            Feature::FastOpen => "fast-open",
            Feature::EcnManglers => "ecn-manglers",
            Feature::PathOptions => "path-options",
            Feature::Pending => "pending",
            Feature::AnyAddress => "any-address",
            Feature::Files => "files",
        }
    }

    /// Drawn apart, so that what else a seed draws is as it was before there was this one.
    pub fn is_drawn_apart(self) -> bool {
        self as u32 >= Feature::Options as u32
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

impl FromStr for Feature {
    type Err = String;

    fn from_str(name: &str) -> Result<Feature, String> {
        Feature::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Feature::ALL.iter().map(|f| f.name()).collect();
            format!("unknown feature of the swarm; expected one of {}", names.join(", "))
        })
    }
}

/// A set of features.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features(u32);

impl Features {
    /// Whether the feature is among them.
    pub fn has(self, f: Feature) -> bool {
        self.0 & f.bit() != 0
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// With `f` added.
    #[must_use]
    pub fn with(self, f: Feature) -> Features {
        Features(self.0 | f.bit())
    }

    /// The features, in order.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |f| self.has(*f))
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Features {
        features.into_iter().fold(Features::default(), Features::with)
    }
}

impl Display for Features {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.iter().map(Feature::name).collect();
        f.write_str(&names.join(","))
    }
}

/// The name of a simulation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// All draws derive from it.
    pub seed: u64,
    /// A scenario of the swarm: hostile, or short of something. Else of a bad network alone.
    pub is_swarm: bool,
    /// Features that the scenario has, and that are left out. The rest stays as it was.
    pub without: Features,
}

impl Case {
    /// The bad network of a seed.
    pub fn network(seed: u64) -> Case {
        Case { seed, is_swarm: false, without: Features::default() }
    }

    /// The scenario of the swarm of a seed.
    pub fn swarm(seed: u64) -> Case {
        Case { seed, is_swarm: true, without: Features::default() }
    }

    /// The same case `n` seeds further.
    #[must_use]
    pub fn after(self, n: u64) -> Case {
        Case { seed: self.seed.wrapping_add(n), ..self }
    }
}

/// As arguments of `fulmar-lab sim`.
impl Display for Case {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        if self.is_swarm {
            f.write_str("--swarm ")?;
        }
        write!(f, "--seed {}", self.seed)?;
        if self.without.is_empty() { Ok(()) } else { write!(f, " --without {}", self.without) }
    }
}
