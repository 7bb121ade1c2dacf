//! `fulmar bench`: the door to the laboratory.

use crate::failure::{During, Failure, Outcome};
use clap::{Subcommand, ValueEnum};
use fulmar_lab::cpu::Placement;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
