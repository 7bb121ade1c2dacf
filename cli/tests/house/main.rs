//! The sources and pages of the project keep its rules.

mod arrows;
mod circles;
mod pages;
mod pictures;
mod secrets;
mod source;
