//! Headers: any input, and another parser as the oracle.

mod any_input;
mod oracle;
