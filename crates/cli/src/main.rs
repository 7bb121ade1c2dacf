//! The command `fulmar`.

fn main() {}
