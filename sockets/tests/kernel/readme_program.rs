use std::io::{Read, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let stack = fulmar::Stack::builder()
        .device(fulmar::devices::open("fulmar0")?)
        .address("10.77.0.2/24".parse()?)
        .build()?;
    let mut stream = fulmar::TcpStream::connect(&stack, "10.77.0.1:8000")?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    println!("{page}");
    Ok(())
}
