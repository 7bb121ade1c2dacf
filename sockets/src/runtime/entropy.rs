//! Secrets from getrandom(2), for a stack without configured secrets: see `docs/secrets.md`.

use std::io;

use fulmar_stack::base::Secrets;

use crate::runtime::start::StartError;
use crate::runtime::sys;

/// Draws secrets from getrandom(2).
///
/// # Errors
/// [`StartError::Random`]: the system call failed.
pub fn draw() -> Result<Secrets, StartError> {
    draw_from(sys::random_bytes)
}

/// The same from `source`, which returns how many bytes it has filled.
fn draw_from(
    source: impl FnOnce(&mut [u8; 32]) -> io::Result<usize>,
) -> Result<Secrets, StartError> {
    let mut entropy = [0; 32];
    match source(&mut entropy) {
        Ok(32) => Ok(Secrets::from_entropy(entropy)),
        Ok(_) => Err(StartError::Random(io::ErrorKind::UnexpectedEof.into())),
        Err(e) => Err(StartError::Random(e)),
    }
}

#[cfg(test)]
mod tests {
    use fulmar_stack::base::KeyUse;

    use super::*;

    #[test]
    fn a_stack_without_random_bytes_does_not_start() {
        let refused = draw_from(|_| Err(io::Error::from_raw_os_error(libc::ENOSYS)));
        assert!(matches!(&refused, Err(StartError::Random(e)) if e.raw_os_error() == Some(38)));
        let said = refused.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(said.contains("cannot read random bytes") && said.contains("getrandom"), "{said}");
        for short in [0, 31] {
            assert!(matches!(draw_from(|_| Ok(short)), Err(StartError::Random(_))), "{short}");
        }
    }

    #[test]
    fn two_draws_of_the_system_are_two_secrets() {
        let keys = [(); 2].map(|()| draw().unwrap().key(KeyUse::InitialSequence).halves());
        assert_ne!(keys[0], keys[1]);
    }
}
