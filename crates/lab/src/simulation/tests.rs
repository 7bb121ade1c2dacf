//! The simulation itself: it replays, it is varied, and its oracle can fail.

use super::*;
