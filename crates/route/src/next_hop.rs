//! Next hops by number, the groups among which flows are spread, and tables chosen by source.
//!
//! Enters: what [`crate::Fib`] answers (the number of a group), the hash of a flow, which next hops
//! are up. Leaves: one next hop. Owns nothing but its entries.
//!
//! A flow keeps its next hop as long as that is up: the member with the highest weight for the flow
//! is taken (rendezvous hashing, Thaler and Ravishankar 1998; RFC 2992 compares the ways), so that a
//! member that goes down moves its own flows only, and they come back with it.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::net::IpAddr;

use crate::{MAX_ANSWER, Prefix};

/// One router, or the link itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct NextHop {
    /// The router to hand packets to; `None` if destinations are on the link.
    pub via: Option<IpAddr>,
    /// The source address to prefer.
    pub src: Option<IpAddr>,
    /// Largest IP packet in bytes, if smaller than the link's.
    pub mtu: Option<usize>,
}

#[derive(Clone, Debug)]
struct Member {
    hop: NextHop,
    is_up: bool,
}

/// The most members of a group: a look-up goes through all of them.
pub const MAX_MEMBERS: usize = 64;

/// Why a group was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupError {
    /// It has no member, or more than [`MAX_MEMBERS`].
    Members,
    /// There are as many groups as numbers.
    Full,
}

impl core::fmt::Display for GroupError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            GroupError::Members => "a group of next hops has from 1 to 64 members",
            GroupError::Full => "there are too many groups of next hops",
        })
    }
}

impl core::error::Error for GroupError {}

/// Next hops of equal cost.
#[derive(Clone, Debug, Default)]
pub struct Group {
    members: Vec<Member>,
    /// How often it was added; 0 if its number is free.
    uses: u32,
}

impl Group {
    /// The next hop of a flow among the members that are up and that `is_usable`; `None` if there is
    /// none. `flow_hash` is the same for all packets of a flow.
    #[inline]
    pub fn choose(&self, flow_hash: u64, is_usable: impl Fn(&NextHop) -> bool) -> Option<&NextHop> {
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

    /// Whether flows are spread over several members.
    #[inline]
    pub fn is_spread(&self) -> bool {
        self.members.len() > 1
    }

    /// The members, up or not.
    pub fn hops(&self) -> impl Iterator<Item = &NextHop> {
        self.members.iter().map(|m| &m.hop)
    }
}

/// Groups of next hops by number. Numbers begin at 1, as answers of a table do. The same next hops in
/// the same order are one group, however often they are added.
#[derive(Clone, Debug, Default)]
pub struct NextHops {
    /// The group of number n is at n - 1.
    groups: Vec<Group>,
    free: Vec<u32>,
    numbers: BTreeMap<Vec<NextHop>, u32>,
    /// Routers that are down, those of groups to come included.
    down: BTreeSet<IpAddr>,
    /// Groups with more than one member.
    spread: usize,
}

/// Routers that can be down at a time: more than a link has.
const MAX_DOWN: usize = 4096;

impl NextHops {
    /// No groups.
    pub fn new() -> NextHops {
        NextHops::default()
    }

    /// Adds a group, or one more use of it; its number, for [`crate::Fib::insert`].
    ///
    /// # Errors
    /// [`GroupError`].
    pub fn add(&mut self, hops: &[NextHop]) -> Result<u32, GroupError> {
        if hops.is_empty() || hops.len() > MAX_MEMBERS {
            return Err(GroupError::Members);
        }
        if let Some(number) = self.numbers.get(hops).copied() {
            if let Some(group) = self.group_mut(number) {
                group.uses = group.uses.saturating_add(1);
            }
            return Ok(number);
        }
        let is_up = |hop: &NextHop| hop.via.is_none_or(|via| !self.down.contains(&via));
        let members = hops.iter().map(|hop| Member { hop: *hop, is_up: is_up(hop) }).collect();
        let group = Group { members, uses: 1 };
        let number = self.place(group)?;
        self.spread = self.spread.saturating_add(usize::from(hops.len() > 1));
        self.numbers.insert(hops.to_vec(), number);
        Ok(number)
    }

    fn place(&mut self, group: Group) -> Result<u32, GroupError> {
        if let Some(number) = self.free.pop() {
            if let Some(place) = self.group_mut(number) {
                *place = group;
            }
            return Ok(number);
        }
        let number = u32::try_from(self.groups.len()).ok().and_then(|n| n.checked_add(1));
        let number = number.filter(|n| *n <= MAX_ANSWER).ok_or(GroupError::Full)?;
        self.groups.push(group);
        Ok(number)
    }

    /// Takes one use of a group back; with the last one the group goes, and its number is given again.
    /// False if there is none. Prefixes that still answer with the number should be gone before.
    pub fn remove(&mut self, number: u32) -> bool {
        let Some(group) = self.group_mut(number).filter(|g| g.uses > 0) else { return false };
        group.uses = group.uses.saturating_sub(1);
        if group.uses > 0 {
            return true;
        }
        let gone = core::mem::take(&mut group.members);
        self.spread = self.spread.saturating_sub(usize::from(gone.len() > 1));
        let hops: Vec<NextHop> = gone.into_iter().map(|m| m.hop).collect();
        self.numbers.remove(&hops);
        self.free.push(number);
        true
    }

    /// Says of every member that goes by way of `via`, now or later, whether it is up. Whether that is
    /// news; false too if too many are down already.
    pub fn set_up(&mut self, via: IpAddr, is_up: bool) -> bool {
        let is_news = match is_up {
            true => self.down.remove(&via),
            false => self.down.len() < MAX_DOWN && self.down.insert(via),
        };
        if is_news {
            let all = self.groups.iter_mut().flat_map(|g| &mut g.members);
            all.filter(|m| m.hop.via == Some(via)).for_each(|m| m.is_up = is_up);
        }
        is_news
    }

    /// The routers that are down.
    pub fn down(&self) -> impl Iterator<Item = IpAddr> {
        self.down.iter().copied()
    }

    /// The group of a number.
    #[inline]
    pub fn group(&self, number: u32) -> Option<&Group> {
        self.groups.get((number as usize).checked_sub(1)?).filter(|g| g.uses > 0)
    }

    /// The next hop of a flow among the members of a group that are up: see [`Group::choose`].
    #[inline]
    pub fn choose(&self, number: u32, flow_hash: u64) -> Option<&NextHop> {
        self.group(number)?.choose(flow_hash, |_| true)
    }

    /// Whether any group has more than one member.
    #[inline]
    pub fn is_spread(&self) -> bool {
        self.spread > 0
    }

    fn group_mut(&mut self, number: u32) -> Option<&mut Group> {
        self.groups.get_mut((number as usize).checked_sub(1)?)
    }
}

/// How much a flow likes a member: a mix of both (the finalizer of splitmix64).
#[inline]
const fn weight(flow_hash: u64, member: u64) -> u64 {
    let z = flow_hash ^ member.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Which table a packet is looked up in, by its source: policy routing. Few rules, gone through in
/// order.
#[derive(Clone, Debug, Default)]
pub struct SourcePolicy {
    /// Longest prefix first.
    rules: Vec<(Prefix, u32)>,
}

impl SourcePolicy {
    /// No rules: table 0 for every source.
    pub fn new() -> SourcePolicy {
        SourcePolicy::default()
    }

    /// Packets from `source` use `table`; the table that the same prefix had before. `None` too if
    /// the prefix is longer than its address, and then nothing changes.
    pub fn insert(&mut self, source: Prefix, table: u32) -> Option<u32> {
        let source = Prefix::new(source.addr, source.len)?;
        if let Some((_, old)) = self.rules.iter_mut().find(|(p, _)| *p == source) {
            return Some(core::mem::replace(old, table));
        }
        let at = self.rules.partition_point(|(p, _)| p.len >= source.len);
        self.rules.insert(at, (source, table));
        None
    }

    /// Takes a rule out; the table it named.
    pub fn remove(&mut self, source: Prefix) -> Option<u32> {
        let source = Prefix::new(source.addr, source.len)?;
        let at = self.rules.iter().position(|(p, _)| *p == source)?;
        Some(self.rules.remove(at).1)
    }

    /// Whether there are no rules.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// How many rules there are.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// The table for packets from `source`: that of the longest rule that holds it, else 0.
    #[inline]
    pub fn table_for(&self, source: IpAddr) -> u32 {
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
    fn flows_are_spread_evenly_and_stay_where_they_are() {
        let (hops, number) = group(4);
        let mut count = [0; 4];
        for flow in 0..40_000u64 {
            let chosen = hops.choose(number, flow).unwrap();
            assert_eq!(hops.choose(number, flow), Some(chosen));
            count[(0..4).position(|n| hop(n) == *chosen).unwrap()] += 1;
        }
        assert!(count.iter().all(|n| (9_000..11_000).contains(n)), "{count:?}");
    }

    #[test]
    fn a_next_hop_that_goes_down_moves_its_own_flows_only() {
        let (mut hops, number) = group(5);
        let before: Vec<NextHop> = (0..1000).map(|f| *hops.choose(number, f).unwrap()).collect();
        assert!(hops.set_up(hop(2).via.unwrap(), false));
        for (flow, old) in before.iter().enumerate() {
            let new = *hops.choose(number, flow as u64).unwrap();
            assert!(new != hop(2) && (new == *old || *old == hop(2)));
        }
        hops.set_up(hop(2).via.unwrap(), true);
        let after: Vec<NextHop> = (0..1000).map(|f| *hops.choose(number, f).unwrap()).collect();
        assert_eq!(after, before);
    }

    #[test]
    fn a_group_whose_members_are_all_down_has_no_next_hop() {
        for n in [1, 3] {
            let (mut hops, number) = group(n);
            (0..n).for_each(|i| assert!(hops.set_up(hop(i).via.unwrap(), false)));
            assert_eq!(hops.choose(number, 7), None);
        }
    }

    #[test]
    fn numbers_begin_at_one_and_are_given_again() {
        let (mut hops, first) = group(1);
        let second = hops.add(&[hop(9)]).unwrap();
        assert_eq!((first, second), (1, 2));
        assert!(hops.remove(first) && !hops.remove(first) && !hops.remove(0) && !hops.remove(3));
        assert_eq!((hops.choose(first, 1), hops.choose(0, 1)), (None, None));
        assert_eq!(hops.add(&[hop(4)]), Ok(first));
        assert_eq!(hops.add(&[]), Err(GroupError::Members));
        assert_eq!(hops.add(&[hop(1); MAX_MEMBERS + 1]), Err(GroupError::Members));
    }

    #[test]
    fn equal_groups_are_one_until_the_last_use_is_gone() {
        let mut hops = NextHops::new();
        let number = hops.add(&[hop(1), hop(2)]).unwrap();
        assert_eq!(hops.add(&[hop(1), hop(2)]), Ok(number));
        assert_ne!(hops.add(&[hop(2), hop(1)]), Ok(number));
        assert!(hops.remove(number) && hops.choose(number, 0).is_some());
        assert!(hops.remove(number) && hops.choose(number, 0).is_none());
        assert!(!hops.remove(number));
    }

    #[test]
    fn a_router_that_is_down_is_down_in_groups_that_come_later() {
        let mut hops = NextHops::new();
        assert!(
            hops.set_up(hop(1).via.unwrap(), false) && !hops.set_up(hop(1).via.unwrap(), false)
        );
        let number = hops.add(&[hop(1), hop(2)]).unwrap();
        assert!((0..100).all(|flow| hops.choose(number, flow) == Some(&hop(2))));
        assert!(hops.set_up(hop(1).via.unwrap(), true));
        assert!((0..100).any(|flow| hops.choose(number, flow) == Some(&hop(1))));
    }

    fn source() -> impl Strategy<Value = (u32, u8)> {
        ((0u32..8).prop_map(|n| n << 29), 0u8..=5)
    }

    proptest! {
        #[test]
        fn the_longest_rule_that_holds_the_source_names_the_table(
            rules in prop::collection::vec((source(), 1u32..9, any::<bool>()), 0..30),
            from: u32,
        ) {
            let (mut policy, mut model) = (SourcePolicy::new(), Vec::<(Prefix, u32)>::new());
            for ((bits, len), table, insert) in rules {
                let prefix = Prefix::new(core::net::Ipv4Addr::from_bits(bits).into(), len).unwrap();
                let old = model.iter().position(|r| r.0 == prefix).map(|at| model.remove(at).1);
                if insert {
                    model.push((prefix, table));
                    prop_assert_eq!(policy.insert(prefix, table), old);
                } else {
                    prop_assert_eq!(policy.remove(prefix), old);
                }
            }
            let from = IpAddr::V4(core::net::Ipv4Addr::from_bits(from));
            let found = model.iter().filter(|r| r.0.contains(from)).max_by_key(|r| r.0.len);
            prop_assert_eq!(policy.table_for(from), found.map_or(0, |r| r.1));
        }
    }
}
