//! The traits by which frameworks take a transport.

#[cfg(feature = "axum")]
mod axum;
#[cfg(feature = "hyper")]
pub(crate) mod hyper;
#[cfg(feature = "quinn")]
pub(crate) mod quinn;
#[cfg(feature = "tonic")]
mod tonic;
