//! An axum server and a hyper client, each over a stack of its own, joined in the process:
//! `cargo run -p fulmar-tokio --features axum,hyper --example axum_hyper`. Over a TAP the server is
//! `devices::open("fulmar0")?` instead (`fulmar sandbox` has one).

use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::routing::get;
use fulmar::{Stack, devices};
use fulmar_tokio::{Connector, Net, TcpListener};
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (a, b) = devices::link_pair()?;
    let server = Net::new(Stack::builder().device(a).address("10.0.0.1/24".parse()?).build()?)?;
    let client = Net::new(Stack::builder().device(b).address("10.0.0.2/24".parse()?).build()?)?;

    let hello = |Path(name): Path<String>| async move { format!("hello {name}") };
    let app = Router::new().route("/hello/{name}", get(hello));
    let listener = TcpListener::bind(&server, "10.0.0.1:80").await?;
    tokio::spawn(async { axum::serve(listener, app).await });

    let http: Client<_, Body> =
        Client::builder(TokioExecutor::new()).build(Connector::new(&client));
    for name in ["fulmar", "tokio"] {
        let response = http.get(format!("http://10.0.0.1/hello/{name}").parse()?).await?;
        let body = response.into_body().collect().await?.to_bytes();
        println!("{}", String::from_utf8_lossy(&body));
        assert_eq!(body, format!("hello {name}"));
    }
    let refused = http.get("http://10.0.0.1:81/".parse()?).await.unwrap_err();
    println!("nobody listens at port 81: {refused}");
    Ok(())
}
