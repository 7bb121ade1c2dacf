use std::io::{Write, copy, stdout};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = fulmar::devices::open("fulmar0")?;
    let stack = fulmar::Stack::builder().device(device).address("10.77.0.2/24".parse()?).build()?;
    let mut stream = fulmar::TcpStream::connect(&stack, "10.77.0.1:8000")?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    copy(&mut stream, &mut stdout())?;
    Ok(())
}
