//! Devices: link, tap, packet
