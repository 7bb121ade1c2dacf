//! A shard: demultiplexing, timers, waiting, and the glue that joins tcp to ip to a device
