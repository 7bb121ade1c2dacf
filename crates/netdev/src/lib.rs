//! The Device contract, offload requests, bursts, and devices that wrap a device
