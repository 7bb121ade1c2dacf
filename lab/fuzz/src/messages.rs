//! DNS messages of a guest and of servers, messages of pesto(1), and the answers of a proxy.

/// The first byte chooses: DNS, pesto, or a proxy.
pub fn gateway_messages(input: &[u8]) {
    match input.split_first() {
        Some((0..64, message)) => fulmar_gateway::fuzzing::dns(message),
        Some((64..128, message)) => fulmar_gateway::fuzzing::pesto(message),
        Some((_, answers)) => fulmar_gateway::fuzzing::proxy(answers),
        None => {}
    }
}
