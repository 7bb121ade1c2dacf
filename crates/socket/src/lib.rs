//! Socket buffers and the steps on them: sosend, soreceive, options, readiness
