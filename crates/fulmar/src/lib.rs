//! A user-space TCP/IP stack: sockets shaped like std::net
