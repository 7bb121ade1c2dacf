//! A gRPC service and its client by tonic, each over a stack of its own, joined in the process:
//! `cargo run -p fulmar-tokio --features tonic,axum,hyper --example grpc`. What `tonic-build` would write from a `.proto` is
//! the path of the call and its codec.

use axum::extract::Request;
use axum::routing::post;
use fulmar::{Stack, devices};
use fulmar_tokio::{Connector, Net, TcpListener};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Endpoint, Server};
use tonic::{Response, Status};
use tonic_prost::ProstCodec;

const PATH: &str = "/example.Greeter/Greet";

#[derive(Clone, PartialEq, prost::Message)]
struct Name {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Greeting {
    #[prost(string, tag = "1")]
    text: String,
}

async fn greet(request: tonic::Request<Name>) -> Result<Response<Greeting>, Status> {
    match request.into_inner().name {
        name if name.is_empty() => Err(Status::invalid_argument("no name")),
        name => Ok(Response::new(Greeting { text: format!("hello {name}") })),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (a, b) = devices::link_pair()?;
    let server = Net::new(Stack::builder().device(a).address("10.0.0.1/24".parse()?).build()?)?;
    let client = Net::new(Stack::builder().device(b).address("10.0.0.2/24".parse()?).build()?)?;

    let call = |request: Request| async {
        let mut grpc = tonic::server::Grpc::new(ProstCodec::<Greeting, Name>::default());
        grpc.unary(tower::service_fn(greet), request).await
    };
    let routes = axum::Router::new().route(PATH, post(call)).into();
    let listener = TcpListener::bind(&server, "10.0.0.1:50051").await?;
    tokio::spawn(Server::builder().add_routes(routes).serve_with_incoming(listener));

    let endpoint = Endpoint::from_static("http://10.0.0.1:50051");
    let channel = endpoint.connect_with_connector(Connector::new(&client)).await?;
    let mut grpc = tonic::client::Grpc::new(channel);
    for name in ["fulmar", "tonic", ""] {
        grpc.ready().await?;
        let request = tonic::Request::new(Name { name: name.to_owned() });
        let codec = ProstCodec::<Name, Greeting>::default();
        match grpc.unary(request, PathAndQuery::from_static(PATH), codec).await {
            Ok(greeting) => println!("{}", greeting.into_inner().text),
            Err(status) => {
                println!("refused: {}", status.message());
                assert!(name.is_empty());
            }
        }
    }
    Ok(())
}
