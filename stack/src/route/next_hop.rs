//! Next hop groups (ECMP) and source policy routing.
//!
//! Input: an answer of `Fib` (the number of a group), a flow hash, the state of gateways.
//! Output: a next hop. Owns its entries only.
//!
//! A flow keeps its next hop while that is up: the member with the highest weight for the flow is
//! selected (rendezvous hashing, Thaler and Ravishankar 1998; RFC 2992 compares methods). When a
//! member goes down, only its own flows move, and they return when it is up again.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::net::IpAddr;

use crate::route::{MAX_ANSWER, Prefix};

/// A gateway, or, by default, the link itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct NextHop {
    /// The gateway; `None`: destinations are on-link.
    pub via: Option<IpAddr>,
    /// The preferred source address.
    pub src: Option<IpAddr>,
    /// MTU of the route, bytes, if smaller than the link's.
    pub mtu: Option<usize>,
}

/// The gateway with this address.
impl From<IpAddr> for NextHop {
    fn from(via: IpAddr) -> NextHop {
        NextHop { via: Some(via), ..NextHop::default() }
    }
}

#[derive(Clone, Debug)]
struct Member {
    hop: NextHop,
    is_up: bool,
}

/// Maximum number of members of a group: a look-up visits all of them.
pub(crate) const MAX_MEMBERS: usize = 64;

/// Why a group was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupError {
    /// The group has no member, or more than `MAX_MEMBERS`.
    Members,
    /// All group numbers are in use.
    Full,
}

impl core::fmt::Display for GroupError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            GroupError::Members => "a group of next hops must have 1 to 64 members",
            GroupError::Full => "too many groups of next hops",
        })
    }
}

impl core::error::Error for GroupError {}

/// Next hops of equal cost.
#[derive(Clone, Debug, Default)]
pub struct Group {
    members: Vec<Member>,
    /// Reference count; 0 if its number is free.
    refs: u32,
}

impl Group {
    /// Selects the next hop of a flow among the members that are up and `is_usable`. `None` if
    /// there is none. `flow_hash` is the same for all packets of a flow.
    #[inline]
    pub fn select(&self, flow_hash: u64, is_usable: impl Fn(&NextHop) -> bool) -> Option<&NextHop> {
        if let [only] = self.members.as_slice() {
            return (only.is_up && is_usable(&only.hop)).then_some(&only.hop);
        }
        let members = self.members.iter().zip(0u64..);
        let up = members.filter(|(m, _)| m.is_up && is_usable(&m.hop));
        let best = up.max_by_key(|(_, index)| weight(flow_hash, *index))?;
        Some(&best.0.hop)
    }

    /// Whether any member is up.
    pub fn is_up(&self) -> bool {
        self.members.iter().any(|m| m.is_up)
    }

    /// Whether the group has several members.
    #[inline]
    pub(crate) fn is_multipath(&self) -> bool {
        self.members.len() > 1
    }

    /// The members, up or not.
    pub fn hops(&self) -> impl Iterator<Item = &NextHop> {
        self.members.iter().map(|m| &m.hop)
    }
}

/// Groups of next hops by number. Numbers start at 1, like the answers of a FIB. Equal lists of
/// next hops share one reference-counted group.
#[derive(Clone, Debug, Default)]
pub struct NextHops {
    /// Group number n is at index n - 1.
    groups: Vec<Group>,
    free: Vec<u32>,
    numbers: BTreeMap<Vec<NextHop>, u32>,
    /// Gateways that are down, also those in no group yet.
    down: BTreeSet<IpAddr>,
    /// Groups with more than one member.
    multipath: usize,
}

/// Limit of gateways that are down: more than a link has.
const MAX_DOWN: usize = 4096;

impl NextHops {
    /// No groups.
    pub fn new() -> NextHops {
        NextHops::default()
    }

    /// Adds a reference to a group, creating it if necessary. Returns its number.
    ///
    /// # Errors
    /// [`GroupError`].
    pub fn add(&mut self, hops: &[NextHop]) -> Result<u32, GroupError> {
        if hops.is_empty() || hops.len() > MAX_MEMBERS {
            return Err(GroupError::Members);
        }
        if let Some(number) = self.numbers.get(hops).copied() {
            if let Some(group) = self.group_mut(number) {
                group.refs = group.refs.saturating_add(1);
            }
            return Ok(number);
        }
        let is_up = |hop: &NextHop| hop.via.is_none_or(|via| !self.down.contains(&via));
        let members = hops.iter().map(|hop| Member { hop: *hop, is_up: is_up(hop) }).collect();
        let group = Group { members, refs: 1 };
        let number = self.store(group)?;
        self.multipath = self.multipath.saturating_add(usize::from(hops.len() > 1));
        self.numbers.insert(hops.to_vec(), number);
        Ok(number)
    }

    fn store(&mut self, group: Group) -> Result<u32, GroupError> {
        if let Some(number) = self.free.pop() {
            if let Some(slot) = self.group_mut(number) {
                *slot = group;
            }
            return Ok(number);
        }
        let number = u32::try_from(self.groups.len()).ok().and_then(|n| n.checked_add(1));
        let number = number.filter(|n| *n <= MAX_ANSWER).ok_or(GroupError::Full)?;
        self.groups.push(group);
        Ok(number)
    }

    /// Removes a reference to a group. With the last one the group is removed and its number may be
    /// reused. False if the group does not exist. Remove the prefixes that answer with the number
    /// first.
    pub fn remove(&mut self, number: u32) -> bool {
        let Some(group) = self.group_mut(number).filter(|g| g.refs > 0) else { return false };
        group.refs = group.refs.saturating_sub(1);
        if group.refs > 0 {
            return true;
        }
        let members = core::mem::take(&mut group.members);
        self.multipath = self.multipath.saturating_sub(usize::from(members.len() > 1));
        let hops: Vec<NextHop> = members.into_iter().map(|m| m.hop).collect();
        self.numbers.remove(&hops);
        self.free.push(number);
        true
    }

    /// Sets the state of the gateway `via` in all current and future groups. Returns whether it
    /// changed; false also if too many gateways are down.
    pub fn set_gateway_up(&mut self, via: IpAddr, is_up: bool) -> bool {
        let is_changed = match is_up {
            true => self.down.remove(&via),
            false => self.down.len() < MAX_DOWN && self.down.insert(via),
        };
        if is_changed {
            let all = self.groups.iter_mut().flat_map(|g| &mut g.members);
            all.filter(|m| m.hop.via == Some(via)).for_each(|m| m.is_up = is_up);
        }
        is_changed
    }

    /// The gateways that are down.
    pub fn down(&self) -> impl Iterator<Item = IpAddr> {
        self.down.iter().copied()
    }

    /// The group of a number.
    #[inline]
    pub fn group(&self, number: u32) -> Option<&Group> {
        self.groups.get((number as usize).checked_sub(1)?).filter(|g| g.refs > 0)
    }

    /// Selects the next hop of a flow among the members of a group that are up: see
    /// [`Group::select`].
    #[inline]
    pub fn select(&self, number: u32, flow_hash: u64) -> Option<&NextHop> {
        self.group(number)?.select(flow_hash, |_| true)
    }

    /// Whether any group has more than one member.
    #[inline]
    pub(crate) fn is_multipath(&self) -> bool {
        self.multipath > 0
    }

    fn group_mut(&mut self, number: u32) -> Option<&mut Group> {
        self.groups.get_mut((number as usize).checked_sub(1)?)
    }
}

/// The rendezvous weight of a member for a flow (finalizer of splitmix64).
#[inline]
const fn weight(flow_hash: u64, member: u64) -> u64 {
    let z = flow_hash ^ member.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Source policy: which table a packet is looked up in, by its source address. Few rules, scanned
/// in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct SourcePolicy {
    /// Longest prefix first.
    rules: Vec<(Prefix, u32)>,
}

impl SourcePolicy {
    /// Sets the table for packets from `source`. Returns the previous table of that prefix. `None`
    /// also if the prefix length exceeds the address length; the policy is then unchanged.
    pub(crate) fn insert(&mut self, source: Prefix, table: u32) -> Option<u32> {
        let source = Prefix::new(source.addr, source.len)?;
        if let Some((_, old)) = self.rules.iter_mut().find(|(p, _)| *p == source) {
            return Some(core::mem::replace(old, table));
        }
        let at = self.rules.partition_point(|(p, _)| p.len >= source.len);
        self.rules.insert(at, (source, table));
        None
    }

    /// Removes a rule. Returns its table.
    pub(crate) fn remove(&mut self, source: Prefix) -> Option<u32> {
        let source = Prefix::new(source.addr, source.len)?;
        let at = self.rules.iter().position(|(p, _)| *p == source)?;
        Some(self.rules.remove(at).1)
    }

    /// Whether there is a rule for exactly this prefix.
    pub(crate) fn has_rule(&self, source: Prefix) -> bool {
        self.rules.iter().any(|(p, _)| *p == source)
    }

    /// Whether there are no rules.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Number of rules.
    pub(crate) fn len(&self) -> usize {
        self.rules.len()
    }

    /// The table for packets from `source`: that of the longest matching rule, else 0.
    #[inline]
    pub(crate) fn table_for(&self, source: IpAddr) -> u32 {
        self.rules.iter().find(|(p, _)| p.contains(source)).map_or(0, |(_, table)| *table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hop(n: u8) -> NextHop {
        NextHop { via: Some(IpAddr::from([10, 0, 0, n])), src: None, mtu: None }
    }

    fn group(n: u8) -> (NextHops, u32) {
        let mut hops = NextHops::new();
        let all: Vec<NextHop> = (0..n).map(hop).collect();
        let number = hops.add(&all).unwrap();
        (hops, number)
    }

    #[test]
    fn flows_are_spread_evenly_and_keep_their_next_hop() {
        let (hops, number) = group(4);
        let mut count = [0; 4];
        for flow in 0..40_000u64 {
            let chosen = hops.select(number, flow).unwrap();
            assert_eq!(hops.select(number, flow), Some(chosen));
            count[(0..4).position(|n| hop(n) == *chosen).unwrap()] += 1;
        }
        assert!(count.iter().all(|n| (9_000..11_000).contains(n)), "{count:?}");
    }

    #[test]
    fn a_next_hop_that_goes_down_moves_its_own_flows_only() {
        let (mut hops, number) = group(5);
        let before: Vec<NextHop> = (0..1000).map(|f| *hops.select(number, f).unwrap()).collect();
        assert!(hops.set_gateway_up(hop(2).via.unwrap(), false));
        for (flow, old) in before.iter().enumerate() {
            let new = *hops.select(number, flow as u64).unwrap();
            assert!(new != hop(2) && (new == *old || *old == hop(2)));
        }
        hops.set_gateway_up(hop(2).via.unwrap(), true);
        let after: Vec<NextHop> = (0..1000).map(|f| *hops.select(number, f).unwrap()).collect();
        assert_eq!(after, before);
    }

    #[test]
    fn a_group_whose_members_are_all_down_has_no_next_hop() {
        for n in [1, 3] {
            let (mut hops, number) = group(n);
            (0..n).for_each(|i| assert!(hops.set_gateway_up(hop(i).via.unwrap(), false)));
            assert_eq!(hops.select(number, 7), None);
        }
    }

    #[test]
    fn numbers_start_at_one_and_are_reused() {
        let (mut hops, first) = group(1);
        let second = hops.add(&[hop(9)]).unwrap();
        assert_eq!((first, second), (1, 2));
        assert!(hops.remove(first) && !hops.remove(first) && !hops.remove(0) && !hops.remove(3));
        assert_eq!((hops.select(first, 1), hops.select(0, 1)), (None, None));
        assert_eq!(hops.add(&[hop(4)]), Ok(first));
        assert_eq!(hops.add(&[]), Err(GroupError::Members));
        assert_eq!(hops.add(&[hop(1); MAX_MEMBERS + 1]), Err(GroupError::Members));
    }

    #[test]
    fn equal_groups_are_shared_until_the_last_reference_is_removed() {
        let mut hops = NextHops::new();
        let number = hops.add(&[hop(1), hop(2)]).unwrap();
        assert_eq!(hops.add(&[hop(1), hop(2)]), Ok(number));
        assert_ne!(hops.add(&[hop(2), hop(1)]), Ok(number));
        assert!(hops.remove(number) && hops.select(number, 0).is_some());
        assert!(hops.remove(number) && hops.select(number, 0).is_none());
        assert!(!hops.remove(number));
    }

    #[test]
    fn a_gateway_that_is_down_is_down_in_later_groups() {
        let mut hops = NextHops::new();
        assert!(
            hops.set_gateway_up(hop(1).via.unwrap(), false)
                && !hops.set_gateway_up(hop(1).via.unwrap(), false)
        );
        let number = hops.add(&[hop(1), hop(2)]).unwrap();
        assert!((0..100).all(|flow| hops.select(number, flow) == Some(&hop(2))));
        assert!(hops.set_gateway_up(hop(1).via.unwrap(), true));
        assert!((0..100).any(|flow| hops.select(number, flow) == Some(&hop(1))));
    }

    fn source() -> impl Strategy<Value = (u32, u8)> {
        ((0u32..8).prop_map(|n| n << 29), 0u8..=5)
    }

    proptest! {
        #[test]
        fn the_longest_matching_rule_selects_the_table(
            rules in prop::collection::vec((source(), 1u32..9, any::<bool>()), 0..30),
            from: u32,
        ) {
            let (mut policy, mut model) = (SourcePolicy::default(), Vec::<(Prefix, u32)>::new());
            for ((bits, len), table, insert) in rules {
                let prefix = Prefix::new(core::net::Ipv4Addr::from_bits(bits).into(), len).unwrap();
                let old = model.iter().position(|r| r.0 == prefix).map(|at| model.remove(at).1);
                if insert {
                    model.push((prefix, table));
                    prop_assert_eq!(policy.insert(prefix, table), old);
                } else {
                    prop_assert_eq!(policy.remove(prefix), old);
                }
                prop_assert_eq!(policy.has_rule(prefix), insert);
            }
            let from = IpAddr::V4(core::net::Ipv4Addr::from_bits(from));
            let found = model.iter().filter(|r| r.0.contains(from)).max_by_key(|r| r.0.len);
            prop_assert_eq!(policy.table_for(from), found.map_or(0, |r| r.1));
        }
    }
}
