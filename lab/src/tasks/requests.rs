//! HTTP by hyper: a server, and clients with one request under way each.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, client, server};
use hyper_util::rt::TokioIo;

use super::ways::{Listen, Stream, Way};
use crate::cpu::{self, MachineClock};

/// The body of an answer.
const BODY: &[u8] = b"Hello, world!\n";

/// What requests, or bytes, have cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    /// How many.
    pub count: u64,
    pub elapsed: Duration,
    /// CPU time of the process.
    pub cpu: Duration,
    /// Busy time of all CPUs.
    pub machine: Duration,
}

/// When a measurement began.
pub(super) struct Begin {
    at: Instant,
    cpu: Duration,
    machine: MachineClock,
}

impl Begin {
    pub(super) fn now() -> io::Result<Begin> {
        let (cpu, machine) = (cpu::process_cpu(None)?, MachineClock::read()?);
        Ok(Begin { at: Instant::now(), cpu, machine })
    }

    pub(super) fn cost(self, count: u64) -> io::Result<Cost> {
        Ok(Cost {
            count,
            elapsed: self.at.elapsed(),
            cpu: cpu::process_cpu(None)?.saturating_sub(self.cpu),
            machine: MachineClock::read()?.since(self.machine).busy,
        })
    }
}

/// Answers every request of a connection, with the headers of [`crate::serve`]'s answer, and counts them.
pub(super) async fn answer(stream: impl Stream, count: Arc<AtomicU64>) {
    let service = service_fn(move |_: Request<Incoming>| {
        count.fetch_add(1, Ordering::Relaxed);
        let response = Response::builder()
            .header("Server", "hello")
            .header("Content-Type", "text/plain")
            .header("Connection", "keep-alive")
            .body(Full::new(Bytes::from_static(BODY)));
        std::future::ready(Ok::<_, Infallible>(response.unwrap_or_default()))
    });
    let mut http = server::conn::http1::Builder::new();
    // The client may have reset it.
    let _ = http.auto_date_header(false).serve_connection(TokioIo::new(stream), service).await;
}

/// Asks until a time; returns how often.
async fn ask(stream: impl Stream, until: Instant) -> io::Result<u64> {
    let (mut send, connection) =
        client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    tokio::spawn(connection);
    let mut count = 0;
    while Instant::now() < until {
        let request =
            Request::builder().uri("/").header("Host", "hello").body(Empty::<Bytes>::new());
        let request = request.map_err(io::Error::other)?;
        let response = send.send_request(request).await.map_err(io::Error::other)?;
        let body = response.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
        if body != BODY {
            return Err(io::Error::other("the answer has another body"));
        }
        count += 1;
    }
    Ok(count)
}

/// Both ends in the present runtime.
pub(super) async fn measure<W: Way>(connections: usize, time: Duration) -> io::Result<Cost> {
    let (way, listener) = W::open().await?;
    tokio::spawn(async move {
        while let Ok(stream) = Listen::accept(&listener).await {
            tokio::spawn(answer(stream, Arc::default()));
        }
    });
    let mut streams = Vec::with_capacity(connections);
    for _ in 0..connections {
        streams.push(way.connect().await?);
    }
    let begin = Begin::now()?;
    let until = begin.at + time;
    let clients: Vec<_> = streams.into_iter().map(|s| tokio::spawn(ask(s, until))).collect();
    let mut requests = 0;
    for client in clients {
        requests += client.await.map_err(io::Error::other)??;
    }
    begin.cost(requests)
}

/// The server's end of that number of connections, to their ends. The account begins after `warm` requests.
pub(super) async fn serve(
    listener: impl Listen,
    connections: usize,
    warm: u64,
) -> io::Result<Cost> {
    let count = Arc::<AtomicU64>::default();
    let mut all = Vec::with_capacity(connections);
    for _ in 0..connections {
        let stream = listener.accept().await?;
        all.push(tokio::spawn(answer(stream, Arc::clone(&count))));
    }
    while count.load(Ordering::Relaxed) < warm {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (begin, before) = (Begin::now()?, count.load(Ordering::Relaxed));
    for one in all {
        one.await.map_err(io::Error::other)?;
    }
    begin.cost(count.load(Ordering::Relaxed) - before)
}
