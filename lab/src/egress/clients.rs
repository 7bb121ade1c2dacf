//! The ordinary clients: each fetches something from the one allowed name, and prints `egress-ok`.

/// A client.
pub(crate) struct Client {
    /// For people.
    pub(crate) name: &'static str,
    /// Programs without which it is absent; `python:MODULE` and `npm:MODULE` are libraries.
    pub(crate) needs: &'static [&'static str],
    /// What sh(1) runs in an empty folder.
    pub(crate) script: &'static str,
}

const fn client(
    name: &'static str,
    needs: &'static [&'static str],
    script: &'static str,
) -> Client {
    Client { name, needs, script }
}

/// In the order of the table.
pub(crate) const CLIENTS: [Client; 30] = [
    client("curl, http", &["curl"], "curl -sS http://ok.test/"),
    client("curl, https", &["curl"], "curl -sS https://ok.test/"),
    client("wget", &["wget"], "wget -qO- http://ok.test/"),
    client(
        "Python urllib, https",
        &["python3"],
        r#"python3 -c 'import urllib.request as u; print(u.urlopen("https://ok.test/").read().decode())'"#,
    ),
    client(
        "Python socket",
        &["python3"],
        r#"python3 -c 'import socket; s = socket.create_connection(("ok.test", 7)); s.send(b"x\n"); print(s.recv(99))'"#,
    ),
    client(
        "bash /dev/tcp",
        &["bash"],
        "bash -c 'exec 3<>/dev/tcp/ok.test/7; echo x >&3; head -n 1 <&3'",
    ),
    client(
        "node fetch, https",
        &["node"],
        r#"node -e 'fetch("https://ok.test/").then(a => a.text()).then(console.log)'"#,
    ),
    client(
        "node http",
        &["node"],
        r#"node -e 'require("http").get("http://ok.test/", a => a.pipe(process.stdout))'"#,
    ),
    client(
        "Java HttpClient",
        &["java", "javac"],
        r#"java -cp "$W" -XX:TieredStopAtLevel=1 Get http://ok.test/"#,
    ),
    client("Go net/http, https", &["go"], r#""$W/get" https://ok.test/"#),
    client("getaddrinfo", &["getent"], "getent ahosts ok.test && echo egress-ok"),
    client("dig", &["dig"], "dig +short ok.test A | grep -x '[0-9.]*' && echo egress-ok"),
    client(
        "ssh banner",
        &["ssh-keyscan", "sshd"],
        "ssh-keyscan -T 5 ok.test 2>/dev/null | grep ed25519 && echo egress-ok",
    ),
    client(
        "git over ssh",
        &["git", "ssh", "sshd"],
        "export GIT_SSH_COMMAND=\"${GIT_SSH_COMMAND:-ssh} -i $W/user_key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null\"\n\
         git clone -q ssh://root@ok.test$W/repo.git && test -d repo/.git && echo egress-ok",
    ),
    client("psql", &["psql"], "psql 'host=ok.test user=a dbname=a' -Atc 'select 1'"),
    client("redis-cli", &["redis-cli"], "redis-cli -h ok.test get a"),
    client(
        "UDP",
        &["python3"],
        r#"python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5); s.connect(("ok.test", 7)); s.send(b"x"); print(s.recv(99))'"#,
    ),
    client("ping", &["ping"], "ping -c 1 -W 3 ok.test && echo egress-ok"),
    client("IPv6", &["curl"], "curl -6 -sS http://ok.test/"),
    client(
        "apt",
        &["apt-get"],
        "mkdir -p l/partial a/partial && touch status && echo 'deb [trusted=yes] http://ok.test/apt ./' > list\n\
         set -- -qq -o Dir::Etc::sourcelist=$PWD/list -o Dir::Etc::sourceparts=- -o Dir::State::lists=$PWD/l \
         -o Dir::Cache=$PWD -o Dir::Cache::archives=$PWD/a -o Dir::State::status=$PWD/status -o APT::Sandbox::User= \
         -o Acquire::Languages=none -o APT::Architecture=amd64 -o Dir::Etc::Parts=/dev/null\n\
         apt-get \"$@\" update && apt-get \"$@\" download hello-egress && ls *.deb && echo egress-ok",
    ),
    client(
        "pip",
        &["python:pip"],
        "$PY -m pip install -q --no-cache-dir --disable-pip-version-check --index-url http://ok.test/pip/ --trusted-host ok.test \
         --no-deps --target . hello-egress && cat hello_egress.py",
    ),
    client(
        "npm",
        &["npm"],
        "npm install --silent --no-audit --no-fund --registry http://ok.test/npm/ hello-egress && \
         test -f node_modules/hello-egress/package.json && echo egress-ok",
    ),
    client(
        "cargo",
        &["cargo"],
        "mkdir -p src .cargo && touch src/lib.rs\n\
         printf '[package]\\nname = \"a\"\\nversion = \"1.0.0\"\\n[dependencies]\\nhello-egress = \"1\"\\n' > Cargo.toml\n\
         printf '[source.crates-io]\\nreplace-with = \"t\"\\n[source.t]\\nregistry = \"sparse+http://ok.test/cargo/\"\\n' \
         > .cargo/config.toml\n\
         cargo fetch -q && ls $CARGO_HOME/registry/src/*/hello-egress-1.0.0/Cargo.toml && echo egress-ok",
    ),
    client(
        "go get",
        &["go"],
        "export GOPATH=$HOME/go GOCACHE=$HOME/cache GOPROXY=http://ok.test/go GONOSUMDB='*' GONOSUMCHECK=1 GOFLAGS= \
         GOSUMDB=off GOTOOLCHAIN=local GOENV=off\n\
         mkdir a && cd a && printf 'module a.test\\n' > go.mod && go get example.test/hello@latest && grep hello go.mod && echo egress-ok",
    ),
    client(
        "skopeo (docker pull)",
        &["skopeo"],
        "printf '{\"default\":[{\"type\":\"insecureAcceptAnything\"}]}' > policy.json\n\
         skopeo --policy policy.json copy -q --src-tls-verify=false docker://ok.test:80/hello:latest dir:image && \
         ls image/manifest.json && echo egress-ok",
    ),
    client("gRPC", &["python:grpc"], r#""$PY" "$W/grpc_client.py" ok.test:50051"#),
    client(
        "WebSocket",
        &["node", "npm:ws"],
        r#"node -e 'const w = new (require("ws"))("ws://ok.test/"); w.on("message", m => { console.log(`${m}`); w.close(); })'"#,
    ),
    client("HTTP/3", &["python:aioquic"], r#""$PY" "$W/http3_client.py" ok.test ok.test"#),
    client("IMAP", &["curl"], "curl -sS imap://ok.test/ -X 'LIST \"\" *'"),
    client("LDAP", &["ldapsearch"], "ldapsearch -x -LLL -H ldap://ok.test -b cn=a"),
];
