//! Next hops by number, the groups among which flows are spread, and tables chosen by source.
//!
//! Enters: what [`crate::Fib`] answers (the number of a group), the hash of a flow, which next hops
//! are up. Leaves: one next hop. Owns nothing but its entries.
//!
//! A flow keeps its next hop as long as that is up: the member with the highest weight for the flow
//! is taken (rendezvous hashing, Thaler and Ravishankar 1998; RFC 2992 compares the ways), so that a
//! member that goes down moves its own flows only, and they come back with it.

use alloc::vec::Vec;
use core::net::IpAddr;

use crate::Prefix;

/// One router, or the link itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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

/// Groups of next hops of equal cost, by number. Numbers begin at 1, as answers of a table do.
#[derive(Clone, Debug, Default)]
pub struct NextHops {
    /// The group of number n is at n - 1; a free one has no members.
    groups: Vec<Vec<Member>>,
    free: Vec<u32>,
}

impl NextHops {
    /// No groups.
    pub fn new() -> NextHops {
        NextHops::default()
    }

    /// Adds a group, all members up; its number, for [`crate::Fib::insert`].
    ///
    /// # Errors
    /// [`GroupError`].
    pub fn add(&mut self, hops: &[NextHop]) -> Result<u32, GroupError> {
        if hops.is_empty() || hops.len() > MAX_MEMBERS {
            return Err(GroupError::Members);
        }
        let members = hops.iter().map(|hop| Member { hop: *hop, is_up: true }).collect();
        let Some(number) = self.free.pop() else {
            self.groups.push(members);
            return u32::try_from(self.groups.len()).map_err(|_| GroupError::Full);
        };
        if let Some(group) = self.group_mut(number) {
            *group = members;
        }
        Ok(number)
    }

    /// Takes a group out; its number is given again. False if there is none. Prefixes that still
    /// answer with the number should be gone before.
    pub fn remove(&mut self, number: u32) -> bool {
        let Some(group) = self.group_mut(number).filter(|g| !g.is_empty()) else { return false };
        group.clear();
        self.free.push(number);
        true
    }

    /// Says of every member that goes by way of `via` whether it is up; how many there are.
    pub fn set_up(&mut self, via: IpAddr, is_up: bool) -> usize {
        let all = self.groups.iter_mut().flatten();
        let mine = all.filter(|m| m.hop.via == Some(via));
        mine.map(|m| m.is_up = is_up).count()
    }

    /// The next hop of a flow among the members that are up; `None` if there is no such group or
    /// none of it is up. `flow_hash` is the same for all packets of a flow.
    #[inline]
    pub fn choose(&self, number: u32, flow_hash: u64) -> Option<&NextHop> {
        let group = self.groups.get((number as usize).checked_sub(1)?)?;
        if let [only] = group.as_slice() {
            return only.is_up.then_some(&only.hop);
        }
        let up = group.iter().zip(0u64..).filter(|(m, _)| m.is_up);
        let best = up.max_by_key(|(_, index)| weight(flow_hash, *index))?;
        Some(&best.0.hop)
    }

    fn group_mut(&mut self, number: u32) -> Option<&mut Vec<Member>> {
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
        assert_eq!(hops.set_up(hop(2).via.unwrap(), false), 1);
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
            (0..n).for_each(|i| assert_eq!(hops.set_up(hop(i).via.unwrap(), false), 1));
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
