//! What benches share whose ways are cells of a matrix of devices, methods and sizes.

use crate::harness::Scenario;
use std::io;

/// Over which device fulmar is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// The simulated NIC with its modelled peer.
    Sim,
    /// TAP to a kernel peer.
    Tap,
    /// AF_PACKET on veth to a kernel peer.
    Packet,
    /// Shared memory, to another process.
    Shm,
    /// To another stack in this process.
    Link,
}

impl Device {
    /// Every device, in the order of the tables.
    pub const ALL: [Device; 5] =
        [Device::Sim, Device::Tap, Device::Packet, Device::Shm, Device::Link];

    /// The name in scenarios and options.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Sim => "sim",
            Device::Tap => "tap",
            Device::Packet => "packet",
            Device::Shm => "shm",
            Device::Link => "link",
        }
    }
}

/// Names of the variants in options, each once.
pub fn method_names<'s>(scenarios: &'s [Scenario<'_>]) -> Vec<&'s str> {
    let mut names: Vec<_> = scenarios.iter().filter_map(|s| s.word("method")).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The ways of a bench by their names in options: fulmar's, and the kernel's, which need namespaces
/// of one's own.
pub struct Names {
    /// Over any device; tap and packet need namespaces of one's own as well.
    pub fulmar: Vec<&'static str>,
    /// The kernel's, on veth and between processes of one host.
    pub kernel: Vec<&'static str>,
}

fn unknown(sentence: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, sentence)
}

impl Names {
    /// Every way that is asked for by name exists. To be asked before anything is opened.
    ///
    /// # Errors
    /// One does not: those that do, with what they need.
    pub fn check_exist(&self, asked: &[String]) -> io::Result<()> {
        let exists = |name: &String| self.fulmar.iter().chain(&self.kernel).any(|n| n == name);
        let Some(wrong) = asked.iter().find(|a| !exists(a)) else { return Ok(()) };
        Err(unknown(format!(
            "unknown variant `{wrong}`; expected one of {} (fulmar) or {} (the kernel). Variants of the kernel, and of \
             fulmar over tap and packet, need namespaces of your own",
            self.fulmar.join(", "),
            self.kernel.join(", ")
        )))
    }

    /// Every way that is asked for by name is among those that were opened.
    ///
    /// # Errors
    /// One is not: those that are.
    pub fn check_opened(asked: &[String], opened: &[&str]) -> io::Result<()> {
        let Some(missing) = asked.iter().find(|a| !opened.contains(&a.as_str())) else {
            return Ok(());
        };
        let rest = match opened.join(", ") {
            none if none.is_empty() => "nothing can be measured with these options".to_owned(),
            there => format!("they allow {there}"),
        };
        Err(unknown(format!(
            "the variant `{missing}` cannot be measured here with the given options; {rest}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_variant_is_refused_with_the_list_of_variants() {
        let names = Names { fulmar: vec!["old", "ours"], kernel: vec!["kernel_write"] };
        let asked = ["kernel_write".to_owned(), "ours".to_owned(), "our".to_owned()];
        let sentence = names.check_exist(&asked).unwrap_err().to_string();
        assert!(
            sentence.starts_with("unknown variant `our`; expected one of old, ours ("),
            "{sentence}"
        );
        assert!(
            sentence.contains("kernel_write (the kernel). Variants of the kernel"),
            "{sentence}"
        );
        assert!(names.check_exist(&asked[..2]).is_ok());
    }

    #[test]
    fn a_variant_that_could_not_be_opened_is_refused_with_those_that_were() {
        let asked = ["ours".to_owned()];
        let sentence = Names::check_opened(&asked, &["old"]).unwrap_err().to_string();
        assert!(sentence.contains("`ours`") && sentence.ends_with("they allow old"), "{sentence}");
        assert!(Names::check_opened(&asked, &["old", "ours"]).is_ok());
    }
}
