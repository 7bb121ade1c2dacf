//! DNS messages of a guest and of servers, and the answers of a proxy.

/// The first byte chooses: DNS, or a proxy.
pub fn gateway_messages(input: &[u8]) {
    match input.split_first() {
        Some((0..128, message)) => fulmar_gateway::fuzzing::dns(message),
        Some((_, answers)) => fulmar_gateway::fuzzing::proxy(answers),
        None => {}
    }
}
