/// Path MTU discovery of a socket's packets (IP_MTU_DISCOVER, IPV6_MTU_DISCOVER).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum MtuDiscovery {
    /// What exceeds the path MTU is fragmented, here or, without DF, by routers (IP_PMTUDISC_DONT).
    #[default]
    Off,
    /// What exceeds the path MTU is refused; IPv4 packets have DF (IP_PMTUDISC_DO, IPV6_DONTFRAG).
    On,
    /// As `On`, but only the MTU of the interface counts, and neither what routers have reported nor the
    /// MTU of a route (IP_PMTUDISC_PROBE): for a protocol that finds the size of packets by probes (RFC 8899
    /// section 4.4).
    Probe,
}

impl MtuDiscovery {
    /// Whether IPv4 packets have DF.
    #[inline]
    pub const fn forbids_fragments(self) -> bool {
        !matches!(self, MtuDiscovery::Off)
    }
}
