//! Secrets from getrandom(2), for a stack without configured secrets: see `docs/secrets.md`.

use std::io;

use fulmar_stack::base::Secrets;

use crate::runtime::sys;

/// Draws secrets from getrandom(2).
///
/// # Errors
/// Those of the system call.
pub fn draw() -> io::Result<Secrets> {
    draw_from(sys::random_bytes)
}

/// The same from `source`, which returns how many bytes it has filled.
fn draw_from(source: impl FnOnce(&mut [u8; 32]) -> io::Result<usize>) -> io::Result<Secrets> {
    let mut entropy = [0; 32];
    match source(&mut entropy)? {
        32 => Ok(Secrets::from_entropy(entropy)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use fulmar_stack::base::KeyUse;

    use super::*;
    use crate::runtime::StartError;

    #[test]
    fn a_stack_without_random_bytes_does_not_start() {
        let refused = draw_from(|_| Err(io::Error::from_raw_os_error(libc::ENOSYS)));
        assert_eq!(refused.as_ref().err().and_then(io::Error::raw_os_error), Some(libc::ENOSYS));
        let said = refused.err().map(|e| StartError::Random(e).to_string()).unwrap_or_default();
        assert!(said.contains("cannot read random bytes") && said.contains("getrandom"), "{said}");
        for short in [0, 31] {
            assert!(draw_from(|_| Ok(short)).is_err(), "{short}");
        }
    }

    #[test]
    fn two_draws_of_the_system_are_two_secrets() {
        let keys = [(); 2].map(|()| draw().unwrap().key(KeyUse::InitialSequence).halves());
        assert_ne!(keys[0], keys[1]);
    }
}
