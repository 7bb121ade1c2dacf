//! Ways out of a program's network namespace besides the network: `fulmar run` reports them, and closes some.

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;

use fulmar_gateway::hidden::{self, Hidden};
use fulmar_gateway::outside::{self, ServiceSocket};
use fulmar_gateway::strict;

use super::runas::is_system_root;

/// What a program of `fulmar run` may use beside its network.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outside {
    /// There are rules, which do not hold for the other ways.
    pub has_rules: bool,
    /// They are closed.
    pub is_strict: bool,
    /// Nothing is said of them.
    pub is_quiet: bool,
    /// Unix sockets that stay.
    pub unix: Vec<PathBuf>,
}

/// Ways that are open.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Ways {
    services: Vec<&'static str>,
    descriptors: Vec<RawFd>,
    /// The program keeps capabilities, or with `--strict` the files of root.
    is_root: bool,
}

impl Outside {
    /// Says which ways are open, if there are rules. To be called before this process opens a socket.
    ///
    /// # Errors
    /// A sentence: a standard stream is a way that `--strict` cannot close.
    pub fn tell(&self, name: &str) -> io::Result<()> {
        if self.is_strict {
            outside::check_standard_streams()?;
        }
        let sentence = self.ways().sentence(self.is_strict);
        if let Some(sentence) = sentence.filter(|_| self.has_rules && !self.is_quiet) {
            eprintln!("{name}: {sentence}");
        }
        Ok(())
    }

    fn ways(&self) -> Ways {
        if self.is_strict {
            return Ways { is_root: is_system_root(), ..Ways::default() };
        }
        let is_root = outside::has_capabilities();
        let mut services: Vec<_> = self.others().iter().map(|socket| socket.name).collect();
        services.dedup();
        Ways { services, descriptors: outside::inherited_sockets(), is_root }
    }

    /// The known sockets of services that the user has not named.
    fn others(&self) -> Vec<ServiceSocket> {
        let mut sockets = outside::service_sockets(|name| std::env::var_os(name));
        sockets.retain(|socket| !self.unix.iter().any(|own| socket.path.starts_with(own)));
        sockets
    }

    /// Closes what rules and `--strict` close, in the program's namespaces.
    ///
    /// # Errors
    /// The step that failed.
    pub fn close(&self) -> io::Result<()> {
        if !self.has_rules && !self.is_strict {
            return Ok(());
        }
        let others = self.others();
        if !self.is_strict || self.unix.is_empty() {
            hidden::hide(Hidden::Resolvers, &self.unix)?;
        } else {
            hidden::hide(Hidden::Services, &self.unix)?;
            others.iter().try_for_each(|socket| hidden::cover(&socket.path))?;
        }
        Ok(())
    }

    /// Confines this process for good, as the last step before it becomes the program.
    ///
    /// # Errors
    /// The step that failed.
    pub fn confine(&self) -> io::Result<()> {
        if self.is_strict { strict::confine(&self.unix) } else { Ok(()) }
    }
}

impl Ways {
    /// `None`: none is open.
    fn sentence(&self, is_strict: bool) -> Option<String> {
        if is_strict {
            let sentence = "as root, the program can change the system's files and settings, and so undo the rules; run \
                            this command as an ordinary user, or omit this line with --quiet";
            return self.is_root.then(|| sentence.to_owned());
        }
        let mut ways = Vec::new();
        if !self.services.is_empty() {
            ways.push(format!("the Unix sockets of {}", self.services.join(", ")));
        }
        if !self.descriptors.is_empty() {
            let numbers: Vec<_> = self.descriptors.iter().map(RawFd::to_string).collect();
            ways.push(format!("the inherited sockets {}", numbers.join(", ")));
        }
        if self.is_root {
            ways.push("root's capabilities".to_owned());
        }
        let ways = Some(ways.join("; ")).filter(|ways| !ways.is_empty())?;
        Some(format!(
            "the rules do not cover {ways} (close with --strict, hide this line with --quiet)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_open_ways_are_one_sentence_and_none_are_nothing() {
        assert_eq!(Ways::default().sentence(false), None);
        let all = Ways { services: vec!["Docker", "X11"], descriptors: vec![5, 7], is_root: true };
        assert_eq!(
            all.sentence(false).unwrap(),
            "the rules do not cover the Unix sockets of Docker, X11; the inherited sockets 5, 7; root's capabilities \
             (close with --strict, hide this line with --quiet)"
        );
        assert_eq!(Ways { is_root: false, ..all.clone() }.sentence(true), None);
        assert!(all.sentence(true).unwrap().contains("as an ordinary user"));
    }
}
