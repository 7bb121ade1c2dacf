//! A guest's interface is set up as it was decided. Runs in namespaces of its own, so it has no harness: a user
//! namespace needs a process of one thread.

use std::io::{self, Write};
use std::net::IpAddr;
use std::path::Path;

use fulmar_gateway::attach::Target;
use fulmar_gateway::guest::{GuestNetwork, GuestOptions};
use fulmar_gateway::host::{HostNetwork, Tables};
use fulmar_netns::{Netns, Route, VethEnd};

fn main() {
    if let Err(e) = fulmar_netns::enter() {
        assert!(
            std::env::var_os("FULMAR_REQUIRE_KERNEL_TESTS").is_none(),
            "must not be skipped: {e}"
        );
        let _ = writeln!(io::stderr(), "SKIPPED gateway: {e}");
        return;
    }
    a_guest_of_a_host_with_two_ip_versions_looks_like_it();
    a_guest_of_a_host_without_a_network_is_alone_on_its_link();
    a_process_that_has_attached_to_a_guest_cannot_be_traced_by_it();
    println!("test result: ok. 3 passed; 0 failed");
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
    plan.configure(&guest).unwrap();
    let tables = Tables::read(&mut guest.netlink().unwrap()).unwrap();
    let eth0 = tables.interfaces.iter().find(|i| i.name == "eth0").unwrap();
    assert!(eth0.is_up && eth0.mtu == 9000);
    for address in ["192.0.2.5", "fd05::5"] {
        assert!(tables.addresses.iter().any(|a| a.address == ip(address)), "{address}");
    }
    for router in ["192.0.2.1", "fd05::1"] {
        let has = tables.routes.iter().any(|r| r.is_default() && r.gateway == Some(ip(router)));
        assert!(has, "no default route through {router}");
    }
}

fn a_guest_of_a_host_without_a_network_is_alone_on_its_link() {
    let found = Netns::new().unwrap().run(|| HostNetwork::read(None)).unwrap();
    assert_eq!((&found.v4, &found.v6), (&None, &None));
    let plan = GuestNetwork::like(&found, &GuestOptions::default());
    let guest = guest_with("tap0");
    plan.configure(&guest).unwrap();
    let tables = Tables::read(&mut guest.netlink().unwrap()).unwrap();
    assert!(tables.routes.iter().any(|r| r.gateway == Some(ip("169.254.2.2"))));
    let missing = GuestNetwork { name: "missing".into(), ..plan };
    assert!(missing.configure(&guest).is_err());
}

fn a_process_that_has_attached_to_a_guest_cannot_be_traced_by_it() {
    nix::sys::prctl::set_dumpable(true).unwrap();
    let here = Path::new("/proc/self/ns/net");
    Target::named(here, Some("/proc/self/ns/user".into())).attach().unwrap();
    assert!(!nix::sys::prctl::get_dumpable().unwrap());
    // What the set-up of a gateway needs of it is still there.
    assert!(Netns::new().is_ok() && std::fs::read_dir("/proc/self/task").is_ok());
}
