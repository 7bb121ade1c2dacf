//! The look with which a wait begins: left out where it has long found nothing.
//!
//! A thread that answers a question and waits for the next one looks for it before it sleeps. Where
//! the sender needs this very CPU, nothing can have come, and the look only delays them. On a device
//! whose descriptor shows what waits it can be left out: the sleep then ends at once.

/// Looks in a row that found nothing, before they are left out.
const ENOUGH: u8 = 16;
/// Waits that begin without one between two that try.
const BETWEEN: u8 = 31;

/// What the first looks of waits were worth.
#[derive(Clone, Copy, Debug, Default)]
pub struct FirstLook {
    /// Looks in a row that found nothing, up to [`ENOUGH`].
    in_vain: u8,
    /// Waits left that begin without one.
    left: u8,
}

impl FirstLook {
    /// Whether the wait that begins now looks first; asked once per wait.
    pub fn is_due(&mut self) -> bool {
        if self.in_vain < ENOUGH || self.left == 0 {
            return true;
        }
        self.left -= 1;
        false
    }

    /// What a first look brought.
    pub fn note(&mut self, has_found: bool) {
        self.in_vain = if has_found { 0 } else { (self.in_vain + 1).min(ENOUGH) };
        self.left = BETWEEN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_in_vain_are_left_out_but_for_one_now_and_then() {
        let mut first = FirstLook::default();
        for _ in 0..ENOUGH {
            assert!(first.is_due());
            first.note(false);
        }
        assert!((0..BETWEEN).all(|_| !first.is_due()));
        assert!(first.is_due());
        first.note(true);
        assert!(first.is_due(), "a look has found something");
    }
}
