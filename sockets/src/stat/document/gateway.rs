//! What the document of a gateway adds to the document of its stack. *Out* is from the guest, *in* is to it.

use std::net::{IpAddr, SocketAddr};

use super::socket::{Connection, present};
use super::{Name, part};

part! { "A gateway."
r#"if let Some(gateway) = &document.gateway {
    println!("{} TCP flows, {} bytes to the guest", gateway.tcp_flows, gateway.bytes_in);
}"#
Gateway {
    guest: Guest, "Its guest.";
    uptime_us: u64, "Since the start.";
    cpu_us: Option<u64>, "CPU time of the process.";
    tcp_flows: u64, "TCP flows since the start.";
    udp_flows: u64, "UDP flows since the start.";
    echo_flows: u64, "Flows of echo requests since the start.";
    bytes_out: u64, "Bytes of payload from the guest.";
    bytes_in: u64, "Bytes of payload to the guest.";
    datagrams_out: u64, "Datagrams from the guest.";
    datagrams_in: u64, "Datagrams to the guest.";
    published: Vec<Port>, "Ports of the host that lead to the guest.";
    host_ports: Vec<Port>, "Ports of the guest's loopback interface that lead to the host.";
    refusals: Vec<Refusal>, "Traffic that was not carried, by reason.";
    spliced: Spliced, "Traffic between the loopback interfaces.";
} }

part! { "The guest of a gateway."
r#"if let Some(guest) = document.gateway.as_ref().map(|gateway| &gateway.guest) {
    println!("the guest has {} on {}", guest.addresses.join(", "), guest.interface);
}"#
Guest {
    pid: Option<u32>, "Process id, if it is a process.";
    path: Option<String>, "Path of its network namespace, if that is a file.";
    network_namespace: Option<u64>, "Inode of its network namespace.";
    interface: String, "Name of its interface.";
    addresses: Vec<String>, "Addresses, each with the length of its prefix.";
} }

part! { "A flow through a gateway."
r#"for flow in document.flows.iter().filter(|flow| flow.direction == "out") {
    println!("{} {:?} to {:?}: {} bytes", flow.protocol, flow.guest, flow.peer, flow.bytes_out);
}"#
Flow {
    protocol: Name, "`tcp`, `udp` or `icmp`.";
    direction: Name, "`out`: begun by the guest; `in`: by a client of a published port or a host.";
    state: Name, "`connecting`, `open` or `half-closed`; of datagrams `open`.";
    guest: Option<SocketAddr>, "The guest's end.";
    peer: Option<SocketAddr>, "The other end as the guest knows it.";
    host: Option<SocketAddr>, "The other end as the host knows it.";
    bytes_out: u64, "Bytes of payload from the guest.";
    bytes_in: u64, "Bytes of payload to the guest.";
    age_us: u64, "Since it began.";
    idle_us: u64, "Since it carried something.";
    recv_queue_bytes: Option<usize>, "Of TCP: bytes of the guest that the gateway has not read.";
    send_queue_bytes: Option<usize>, "Of TCP: bytes that the guest has not acknowledged.";
    #[serde(flatten, deserialize_with = "present")]
    tcp: Option<Connection>, "Of TCP: the connection with the guest.";
    host_rtt_us: Option<u64>, "Round-trip time of the connection with the host.";
    host_retransmits: Option<u32>, "Segments retransmitted on the connection with the host.";
    host_in_flight_pkts: Option<u32>, "Segments to the host sent and not acknowledged.";
    host_unsent_bytes: Option<u32>, "Bytes in the kernel's send buffer to the host, not sent yet.";
} }

part! { "A port of one side that leads to the other; consecutive ports to which nothing came are one."
r#"for port in document.gateway.iter().flat_map(|gateway| &gateway.published) {
    println!("{} port {} leads to port {:?} of the guest", port.protocol, port.port, port.guest_port);
}"#
Port {
    protocol: Name, "`tcp` or `udp`.";
    address: Option<IpAddr>, "The address it is bound to; none: all of both IP versions.";
    interface: Option<String>, "The interface it is bound to.";
    port: u16, "The port that is bound.";
    last_port: u16, "The last port, if there are several.";
    #[serde(skip_serializing_if = "Option::is_none")]
    guest_port: Option<u16>, "The guest's port that it leads to.";
    #[serde(skip_serializing_if = "Option::is_none")]
    last_guest_port: Option<u16>, "The last port of the guest.";
    #[serde(skip_serializing_if = "Option::is_none")]
    host_port: Option<u16>, "The host's port that it leads to.";
    #[serde(skip_serializing_if = "Option::is_none")]
    last_host_port: Option<u16>, "The last port of the host.";
    connections: u64, "TCP: clients that were accepted. UDP: flows of clients.";
    refused: u64, "TCP: clients that were reset before the other side had accepted them. UDP: datagrams that got no flow.";
} }

part! { "Traffic that was not carried for one reason."
r#"for refusal in document.gateway.iter().flat_map(|gateway| &gateway.refusals) {
    println!("{} times: {}", refusal.count, refusal.sentence);
}"#
Refusal {
    reason: Name, "Name of the reason.";
    count: u64, "How often.";
    sentence: Name, "The reason in a sentence.";
} }

part! { "Connections between the loopback interfaces. *There* is from the accepted socket to the connected one."
r#"if let Some(spliced) = document.gateway.as_ref().map(|gateway| &gateway.spliced) {
    println!("{} connections, {} refused", spliced.connections, spliced.refused);
}"#
Spliced {
    connections: u64, "Connections whose both ends were connected.";
    refused: u64, "Connections reset because the destination refused.";
    dropped: u64, "Connections reset at a limit.";
    bytes_there: u64, "Bytes there.";
    bytes_back: u64, "Bytes back.";
    datagrams_there: u64, "Datagrams there.";
    datagrams_back: u64, "Datagrams back.";
    datagrams_lost: u64, "Datagrams that a socket did not take.";
    displaced: u64, "Clients of UDP ports that were replaced by others.";
} }
