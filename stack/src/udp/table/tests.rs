use super::*;
use proptest::prelude::*;

fn a(s: &str) -> SocketAddr {
    s.parse().unwrap()
}

fn any_port(_: u16) -> bool {
    true
}

const SHARE: BindOptions = BindOptions { reuse_address: true, only_v6: false, any_port: false };
const ALONE: BindOptions = BindOptions { reuse_address: false, only_v6: false, any_port: false };
const V6_ONLY: BindOptions = BindOptions { reuse_address: false, only_v6: true, any_port: false };

fn table() -> UdpTable<u32> {
    UdpTable::new(&Secrets::for_simulation(1))
}

#[test]
fn the_most_specific_binding_gets_the_datagram() {
    let mut t = table();
    t.bind(1, a("0.0.0.0:53"), SHARE, any_port).unwrap();
    t.bind(2, a("10.0.0.1:53"), SHARE, any_port).unwrap();
    let c = t.bind(3, a("10.0.0.1:53"), SHARE, any_port).unwrap();
    t.connect(c.slot, a("10.0.0.1:53"), a("10.0.0.9:99")).unwrap();
    assert_eq!(t.lookup(a("10.0.0.1:53"), a("10.0.0.9:99")), Some(3));
    assert_eq!(t.lookup(a("10.0.0.1:53"), a("10.0.0.9:98")), Some(2));
    assert_eq!(t.lookup(a("10.0.0.2:53"), a("10.0.0.9:99")), Some(1));
    assert_eq!(t.lookup(a("10.0.0.2:54"), a("10.0.0.9:99")), None);
}

#[test]
fn a_connected_socket_receives_only_from_its_peer() {
    let mut t = table();
    let c = t.bind(1, a("10.0.0.1:53"), ALONE, any_port).unwrap();
    t.connect(c.slot, a("10.0.0.1:53"), a("10.0.0.9:99")).unwrap();
    assert_eq!(t.lookup(a("10.0.0.1:53"), a("10.0.0.8:99")), None);
    assert_eq!(t.lookup(a("10.0.0.1:53"), a("10.0.0.9:99")), Some(1));
    assert_eq!(t.unbind(c.slot), Some(1));
    assert_eq!(t.lookup(a("10.0.0.1:53"), a("10.0.0.8:99")), None);
    assert_eq!(t.unbind(c.slot), None);
}

#[test]
fn an_address_is_bound_once_unless_all_share_it() {
    let mut t = table();
    t.bind(1, a("10.0.0.1:53"), ALONE, any_port).unwrap();
    assert_eq!(t.bind(2, a("10.0.0.1:53"), SHARE, any_port), Err(BindError::InUse));
    assert_eq!(t.bind(2, a("0.0.0.0:53"), ALONE, any_port), Err(BindError::InUse));
    assert!(t.bind(2, a("10.0.0.2:53"), ALONE, any_port).is_ok());
    t.bind(3, a("10.0.0.1:80"), SHARE, any_port).unwrap();
    t.bind(4, a("10.0.0.1:80"), SHARE, any_port).unwrap();
    assert_eq!(t.lookup(a("10.0.0.1:80"), a("10.0.0.9:1")), Some(4));
}

#[test]
fn a_dual_stack_wildcard_takes_ipv4_and_conflicts_with_it() {
    let mut t = table();
    t.bind(1, a("[::]:53"), ALONE, any_port).unwrap();
    assert_eq!(t.lookup(a("10.0.0.1:53"), a("10.0.0.9:99")), Some(1));
    assert_eq!(t.lookup(a("[2001:db8::1]:53"), a("[2001:db8::9]:99")), Some(1));
    assert_eq!(t.bind(2, a("0.0.0.0:53"), ALONE, any_port), Err(BindError::InUse));
}

#[test]
fn a_v6_only_wildcard_does_not_receive_ipv4() {
    let mut t = table();
    t.bind(1, a("[::]:53"), V6_ONLY, any_port).unwrap();
    assert_eq!(t.lookup(a("10.0.0.1:53"), a("10.0.0.9:99")), None);
    t.bind(2, a("0.0.0.0:53"), ALONE, any_port).unwrap();
    assert_eq!(t.lookup(a("10.0.0.1:53"), a("10.0.0.9:99")), Some(2));
    assert_eq!(t.lookup(a("[2001:db8::1]:53"), a("[2001:db8::9]:99")), Some(1));
}

#[test]
fn ephemeral_ports_are_free_fitting_and_random() {
    let mut t = table();
    let even = |p: u16| p.is_multiple_of(2);
    let ports: Vec<u16> =
        (0..500).map(|n| t.bind(n, a("0.0.0.0:0"), ALONE, even).unwrap().local.port()).collect();
    assert!(ports.iter().all(|p| (32_768..61_000).contains(p) && p.is_multiple_of(2)));
    let distinct: std::collections::BTreeSet<_> = ports.iter().collect();
    assert_eq!(distinct.len(), 500);
    assert!(ports.windows(2).filter(|w| w[0].abs_diff(w[1]) < 100).count() < 20);
}

#[test]
fn without_a_free_ephemeral_port_bind_fails() {
    let mut t = table();
    let only = |p: u16| p == 40_000;
    t.bind(1, a("0.0.0.0:0"), SHARE, only).unwrap();
    assert_eq!(t.bind(2, a("0.0.0.0:0"), SHARE, only), Err(BindError::NoPorts));
    assert_eq!(t.len(), 1);
}

#[test]
fn a_connected_pair_is_unique_unless_shared() {
    let mut t = table();
    let one = t.bind(1, a("10.0.0.1:53"), SHARE, any_port).unwrap();
    let two = t.bind(2, a("0.0.0.0:53"), SHARE, any_port).unwrap();
    let three = t.bind(3, a("10.0.0.2:53"), ALONE, |_| true);
    assert_eq!(three, Err(BindError::InUse));
    let (local, remote) = (a("10.0.0.1:53"), a("10.0.0.9:99"));
    t.connect(one.slot, local, remote).unwrap();
    t.connect(one.slot, local, remote).unwrap();
    t.connect(two.slot, local, remote).unwrap();
    assert_eq!(t.lookup(local, remote), Some(2));
    assert_eq!(t.connect(99, local, remote), Err(BindError::NotBound));
}

/// The model: a binding in a list that is scanned linearly.
#[derive(Clone, Debug)]
struct Model {
    handle: u32,
    slot: u32,
    local: SocketAddr,
    connected: Option<(SocketAddr, SocketAddr)>,
    only_v6: bool,
    /// When its key last changed: of equally specific bindings the latest wins.
    age: usize,
}

impl Model {
    fn score(&self, local: SocketAddr, remote: SocketAddr) -> Option<u8> {
        if let Some(pair) = self.connected {
            return (pair == (local, remote)).then_some(4);
        }
        if self.local.port() != local.port() {
            return None;
        }
        let (own, ip) = (self.local.ip(), local.ip());
        match own == ip {
            true => Some(3),
            false if !own.is_unspecified() => None,
            false if own.is_ipv4() == ip.is_ipv4() => Some(2),
            false if own.is_ipv6() && !self.only_v6 => Some(1),
            false => None,
        }
    }
}

fn any_addr(wildcards: bool) -> impl Strategy<Value = SocketAddr> {
    let ips = ["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "0.0.0.0", "::"];
    let count = if wildcards { 6 } else { 4 };
    (0usize..count, 1u16..4)
        .prop_map(move |(i, port)| SocketAddr::new(ips[i].parse::<IpAddr>().unwrap(), port))
}

#[derive(Clone, Debug)]
enum Step {
    Bind(SocketAddr, bool, bool),
    Connect(usize, SocketAddr),
    Unbind(usize),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any_addr(true), prop::bool::weighted(0.8), any::<bool>())
            .prop_map(|(a, r, v)| Step::Bind(a, r, v)),
        2 => (any::<usize>(), any_addr(false)).prop_map(|(n, r)| Step::Connect(n, r)),
        1 => any::<usize>().prop_map(Step::Unbind),
    ]
}

fn apply(t: &mut UdpTable<u32>, model: &mut Vec<Model>, step: Step, age: usize) {
    let pick = |n: usize| if model.is_empty() { None } else { Some(n % model.len()) };
    match step {
        Step::Bind(local, reuse_address, only_v6) => {
            let options = BindOptions { reuse_address, only_v6, any_port: false };
            if let Ok(b) = t.bind(age as u32, local, options, any_port) {
                let (handle, slot) = (age as u32, b.slot);
                model.push(Model { handle, slot, local, connected: None, only_v6, age });
            }
        }
        Step::Connect(n, remote) => {
            let Some(i) = pick(n) else { return };
            let m = &mut model[i];
            let ip = if remote.is_ipv4() { "10.0.0.1" } else { "2001:db8::1" };
            let local = SocketAddr::new(ip.parse().unwrap(), m.local.port());
            if t.connect(m.slot, local, remote).is_ok() {
                (m.connected, m.age) = (Some((local, remote)), age);
            }
        }
        Step::Unbind(n) => {
            let Some(i) = pick(n) else { return };
            let m = model.remove(i);
            assert_eq!(t.unbind(m.slot), Some(m.handle));
        }
    }
}

proptest! {
    #[test]
    fn lookup_agrees_with_a_linear_scan(
        steps in prop::collection::vec(any_step(), 1..80),
        probes in prop::collection::vec((any_addr(false), any_addr(false)), 30),
    ) {
        let (mut t, mut model) = (table(), Vec::new());
        for (age, step) in steps.into_iter().enumerate() {
            apply(&mut t, &mut model, step, age);
            prop_assert_eq!(t.len(), model.len());
        }
        for (local, remote) in probes {
            let best = model
                .iter()
                .filter_map(|m| Some((m.score(local, remote)?, m.age, m.handle)))
                .max()
                .map(|(_, _, handle)| handle);
            prop_assert_eq!(t.lookup(local, remote), best, "{} {}", local, remote);
        }
    }
}

#[test]
fn a_binding_to_every_port_receives_what_no_other_binding_does() {
    let mut table = table();
    let every = BindOptions { any_port: true, ..BindOptions::default() };
    let bound = table.bind(1, a("[::]:0"), every, |_| true).unwrap();
    assert_eq!(bound.local, a("[::]:0"));
    table.bind(2, a("0.0.0.0:53"), BindOptions::default(), |_| true).unwrap();
    let own = table.bind(3, a("10.0.0.1:54"), BindOptions::default(), |_| true).unwrap();
    let from = a("10.0.0.9:1000");
    let found = |table: &UdpTable<u32>, local: &str| table.lookup(a(local), from);
    assert_eq!(found(&table, "192.0.2.7:443"), Some(1));
    assert_eq!(found(&table, "192.0.2.7:53"), Some(2));
    assert_eq!(found(&table, "10.0.0.1:54"), Some(3));
    assert_eq!(found(&table, "10.0.0.2:54"), Some(1));
    let six = a("[2001:db8::9]:1000");
    assert_eq!(table.lookup(a("[2001:db8::7]:53"), six), Some(1));
    assert_eq!(table.lookup_prepared(&table.prepare_lookup(a("192.0.2.7:443"), from)), Some(1));
    let again = table.bind(4, a("0.0.0.0:0"), every, |_| true);
    assert_eq!(again.err(), Some(BindError::InUse));
    // A port of the table's choice is still one of its own.
    let drawn = table.bind(5, a("0.0.0.0:0"), BindOptions::default(), |_| true).unwrap();
    assert_ne!(drawn.local.port(), 0);
    table.unbind(bound.slot);
    table.unbind(own.slot);
    assert_eq!(found(&table, "10.0.0.1:54"), None);
    assert_eq!(found(&table, "192.0.2.7:443"), None);
}

#[test]
fn every_port_of_one_address_comes_before_every_port_of_all() {
    let mut table = table();
    let every = BindOptions { any_port: true, only_v6: true, ..BindOptions::default() };
    table.bind(1, a("[::]:0"), every, |_| true).unwrap();
    table.bind(2, a("10.0.0.1:0"), every, |_| true).unwrap();
    let from = a("10.0.0.9:1000");
    assert_eq!(table.lookup(a("10.0.0.1:7"), from), Some(2));
    assert_eq!(table.lookup(a("10.0.0.2:7"), from), None, "the other one takes no IPv4");
}
