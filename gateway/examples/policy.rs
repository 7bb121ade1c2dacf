//! A policy that a program embeds: a file, or rules of its own, and a log of what is refused.
//!
//! `policy FILE`: prints what the policy of a [`Gateway`](fulmar_gateway::Gateway) decides about some destinations.

use std::path::Path;

use fulmar_gateway::Policy;
use fulmar_gateway::policy::{ByRules, Decision, NewFlow, Protocol, Ruling};
use fulmar_gateway::rules::file::PolicyFile;

/// Asks the rules first, and refuses what they allow on the port of mail.
struct WithoutMail(ByRules);

impl Policy for WithoutMail {
    fn decide(&mut self, flow: &NewFlow<'_>) -> Ruling {
        let is_mail = flow.protocol == Protocol::Tcp && flow.to.port() == 25;
        let ruling = if is_mail { Decision::Deny.into() } else { self.0.decide(flow) };
        println!("{:?} {}: {:?}", flow.name.unwrap_or("-"), flow.to, ruling.decision);
        ruling
    }

    fn decide_name(&mut self, name: &str, record_type: u16) -> Decision {
        self.0.decide_name(name, record_type)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: policy FILE")?;
    let file = PolicyFile::parse(&std::fs::read_to_string(&path)?, Path::new(&path))?;
    let mut policy = WithoutMail(ByRules::new(file.rules, Vec::new()));
    // A gateway takes it as `config.policy = Some(Box::new(policy))`, and asks it about each flow:
    for (name, to) in [("github.com", "192.0.2.1:443"), ("github.com", "192.0.2.1:25")] {
        let flow = NewFlow::new(Protocol::Tcp, "10.0.0.2:40000".parse()?, to.parse()?);
        policy.decide(&NewFlow { name: Some(name), ..flow });
    }
    Ok(())
}
