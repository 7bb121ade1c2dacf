//! The address is the name: a name that the policy allows has addresses of its own, which lead nowhere else.
//!
//! ```text
//!   guest: A example.org? ──► allowed? ──► looked up (pins) ──► an address of its own (given)
//!   guest: SYN to that address ──► the name (given) ──► its addresses (pins) ──► each checked ──► connect
//! ```
//!
//! A connection to such an address can mean one name, whatever protocol it carries, although hosts of many names share
//! their real addresses.

mod given;
pub(crate) mod messages;
pub(crate) mod pins;

pub(crate) use given::{Addresses, Given};
pub use given::{MOST_NAMES, Ranges};
