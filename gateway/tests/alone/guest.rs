//! A guest's interface is set up as it was decided. Runs in namespaces of its own, so it has no harness: a user
//! namespace needs a process of one thread.

use std::io::{self, Write};
use std::net::IpAddr;
use std::path::Path;

use fulmar_gateway::attach::Target;
use fulmar_gateway::guest::{GuestNetwork, GuestOptions};
use fulmar_gateway::host::{HostNetwork, Tables};
use fulmar_gateway::netns::{Netns, Route, VethEnd};

pub fn main() {
    if let Err(e) = fulmar_gateway::netns::enter() {
        assert!(
            std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
            "must not be skipped: {e}"
        );
        let _ = writeln!(io::stderr(), "SKIPPED gateway: {e}");
        return;
    }
    a_guest_of_a_host_with_two_ip_versions_looks_like_it();
    a_guest_of_a_host_without_a_network_is_alone_on_its_link();
    routes_of_the_host_are_those_of_the_guest_with_their_flags();
    a_host_with_one_address_and_a_router_beyond_it_gives_a_guest_the_same();
    what_the_guests_kernel_refuses_is_told_and_the_guest_has_a_way_out();
    a_process_that_has_attached_to_a_guest_cannot_be_traced_by_it();
    println!("test result: ok. 6 passed; 0 failed");
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A namespace with an interface of this name, as the TAP of a gateway would stand in it.
fn guest_with(name: &str) -> Netns {
    let guest = Netns::new().unwrap();
    let near = VethEnd { name, mac: [2, 0, 0, 0, 0, 7], mtu: 1500 };
    let far = VethEnd { name: "far", mac: [2, 0, 0, 0, 0, 8], mtu: 1500 };
    guest.add_veth(&near, &guest, &far).unwrap();
    guest.set_up("far").unwrap();
    guest
}

fn a_guest_of_a_host_with_two_ip_versions_looks_like_it() {
    let host = guest_with("eth0");
    host.set_address("eth0", ip("192.0.2.5"), 24).unwrap();
    host.set_address("eth0", ip("fd05::5"), 64).unwrap();
    let index = host.if_index("eth0").unwrap();
    let mut netlink = host.netlink().unwrap();
    netlink.add_route(&Route::default_through(index, ip("192.0.2.1"))).unwrap();
    netlink.add_route(&Route::default_through(index, ip("fd05::1"))).unwrap();
    let found = host.run(|| HostNetwork::read(None)).unwrap();
    assert_eq!(found.v4.as_ref().unwrap().gateway, Some(ip("192.0.2.1")));
    assert_eq!(found.v6.as_ref().unwrap().gateway, Some(ip("fd05::1")));
    assert!(host.run(|| HostNetwork::read(Some("nothing"))).is_err());

    let plan =
        GuestNetwork::like(&found, &GuestOptions { mtu: Some(9000), ..GuestOptions::default() });
    let guest = guest_with("eth0");
    assert_eq!(plan.configure(&guest).unwrap(), [""; 0]);
    let tables = Tables::read(&mut guest.netlink().unwrap()).unwrap();
    let eth0 = tables.interfaces.iter().find(|i| i.name == "eth0").unwrap();
    assert!(eth0.is_up && eth0.mtu == 9000);
    for address in ["192.0.2.5", "fd05::5"] {
        assert!(tables.addresses.iter().any(|a| a.address == ip(address)), "{address}");
    }
    for router in ["192.0.2.1", "fd05::1"] {
        let has = tables.routes.iter().any(|r| r.is_default() && r.gateway() == Some(ip(router)));
        assert!(has, "no default route through {router}");
    }
}

fn a_guest_of_a_host_without_a_network_is_alone_on_its_link() {
    let found = Netns::new().unwrap().run(|| HostNetwork::read(None)).unwrap();
    assert_eq!((&found.v4, &found.v6), (&None, &None));
    let plan = GuestNetwork::like(&found, &GuestOptions::default());
    let guest = guest_with("tap0");
    assert_eq!(plan.configure(&guest).unwrap(), [""; 0]);
    let tables = Tables::read(&mut guest.netlink().unwrap()).unwrap();
    assert!(tables.routes.iter().any(|r| r.gateway() == Some(ip("169.254.2.2"))));
    let missing = GuestNetwork { name: "missing".into(), ..plan };
    assert!(missing.configure(&guest).is_err());
}

/// A host whose routes are those that these lines of ip-route(8) add.
fn host_with(addresses: &[(&str, u8)], routes: &[&str]) -> Netns {
    let host = guest_with("eth0");
    for (address, prefix_len) in addresses {
        host.set_address("eth0", ip(address), *prefix_len).unwrap();
    }
    for route in routes {
        let add = || {
            let words = ["-6", "route", "add"];
            let is_v6 = route.contains("::") && !route.contains("inet6");
            let words = if is_v6 { &words[..] } else { &words[1..] };
            let mut ip = std::process::Command::new("ip");
            ip.args(words).args(route.split_whitespace()).output()
        };
        let done = host.run(add).expect("ip(8)");
        assert!(done.status.success(), "{route}: {}", String::from_utf8_lossy(&done.stderr));
    }
    host
}

/// The routes of a guest of a host, without those that a kernel makes by itself, and what was refused.
fn routes_of_guest(host: &Netns, guest: &Netns) -> (Vec<Route>, Vec<String>) {
    let found = host.run(|| HostNetwork::read(None)).unwrap();
    let refused = GuestNetwork::like(&found, &GuestOptions::default()).configure(guest).unwrap();
    (routes_in(guest), refused)
}

fn routes_in(netns: &Netns) -> Vec<Route> {
    let mut routes = netns.netlink().unwrap().routes().unwrap();
    routes.retain(|r| r.gateway().is_some() || !r.destination.to_string().starts_with("fe80"));
    for hop in routes.iter_mut().flat_map(|r| &mut r.hops) {
        hop.index = 0;
    }
    routes.sort_by_key(|r| format!("{r:?}"));
    routes
}

fn routes_of_the_host_are_those_of_the_guest_with_their_flags() {
    let lines = [
        "default via 192.0.2.1 dev eth0 src 192.0.2.5 metric 50",
        "198.51.101.0/24 via 192.0.2.1 dev eth0 src 192.0.2.6",
        "default via 192.0.2.1 dev eth0 tos 0x10",
        "198.51.100.0/24 via 203.0.113.9 dev eth0 onlink mtu 1400",
        "198.18.0.0/16 nexthop via 192.0.2.1 dev eth0 weight 3 nexthop via 192.0.2.2 dev eth0",
        "198.19.0.0/16 dev eth0 scope 200",
        "203.0.113.0/25 via inet6 fe80::99 dev eth0",
        "default via fe80::99 dev eth0 metric 77",
        "2001:db8:1::/48 via 2001:db8::99 dev eth0 onlink",
        "2001:db8:2::/48 nexthop via fd05::1 dev eth0 nexthop via fd05::2 dev eth0",
        "unreachable 198.51.100.128/25",
        "blackhole 2001:db8:3::/48",
    ];
    let addresses = [("192.0.2.5", 24), ("192.0.2.6", 24), ("fd05::5", 64)];
    let host = host_with(&addresses, &lines);
    let (guests, refused) = routes_of_guest(&host, &guest_with("eth0"));
    assert_eq!(refused, [""; 0]);
    assert_eq!(guests, routes_in(&host));
    let has = |destination: &str| guests.iter().any(|r| r.destination == ip(destination));
    assert!(has("198.19.0.0") && !has("198.51.100.128") && !has("2001:db8:3::"));
}

fn a_host_with_one_address_and_a_router_beyond_it_gives_a_guest_the_same() {
    let lines =
        ["default via 198.51.100.1 dev eth0 onlink", "default via 2001:db8::1 dev eth0 onlink"];
    let host = host_with(&[("198.51.100.2", 32), ("2001:db8:f::2", 128)], &lines);
    let (guests, refused) = routes_of_guest(&host, &guest_with("eth0"));
    assert_eq!(refused, [""; 0]);
    for router in ["198.51.100.1", "2001:db8::1"] {
        let default = guests.iter().find(|r| r.is_default() && r.gateway() == Some(ip(router)));
        assert!(default.is_some_and(|r| r.hops[0].is_onlink), "{router}: {guests:?}");
    }
}

fn what_the_guests_kernel_refuses_is_told_and_the_guest_has_a_way_out() {
    let host = host_with(&[("192.0.2.5", 24)], &["default via 192.0.2.1 dev eth0"]);
    let found = host.run(|| HostNetwork::read(None)).unwrap();
    let mut plan = GuestNetwork::like(&found, &GuestOptions::default());
    plan.addresses[0].0 = ip("10.0.0.5");
    plan.addresses.push((ip("ff02::1"), 64));
    plan.routes.retain(Route::is_default);
    let guest = guest_with("eth0");
    let refused = plan.configure(&guest).unwrap();
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(
        refused[0].starts_with("cannot add the address ff02::1/64 to the guest: "),
        "{refused:?}"
    );
    assert!(
        refused[1].starts_with("cannot add a route to 0.0.0.0/0 to the guest: "),
        "{refused:?}"
    );
    let routes = routes_in(&guest);
    let default = routes.iter().find(|r| r.is_default()).expect("a way out");
    assert_eq!(default.gateway(), Some(ip("169.254.2.2")));
}

fn a_process_that_has_attached_to_a_guest_cannot_be_traced_by_it() {
    nix::sys::prctl::set_dumpable(true).unwrap();
    let here = Path::new("/proc/self/ns/net");
    Target::named(here, Some("/proc/self/ns/user".into())).attach().unwrap();
    assert!(!nix::sys::prctl::get_dumpable().unwrap());
    // The parts that the set-up of a gateway needs are still there.
    assert!(Netns::new().is_ok() && std::fs::read_dir("/proc/self/task").is_ok());
}
