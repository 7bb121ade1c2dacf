//! IPv4 and IPv6 input and output, ICMP, ARP, NDP, path MTU

#![cfg_attr(not(test), no_std)]
