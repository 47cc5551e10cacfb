//! The API through `kubectl proxy`: a request costs no start of kubectl.

use crate::Bench;
use ferrite_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Long enough for anything that comes at all.
pub const PATIENCE: Duration = Duration::from_secs(180);

pub struct Api {
    proxy: Child,
    address: String,
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.proxy.kill();
        let _ = self.proxy.wait();
    }
}

impl Api {
    pub fn start(bench: &Bench) -> Self {
        let mut proxy = bench.kubectl(&["proxy", "--port=0"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(proxy.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { proxy, address: line.trim().rsplit(' ').next().unwrap().to_owned() }
    }

    /// Reads an answer of HTTP/1.0, which ends with the connection.
    pub fn send(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = self.request(method, path, body);
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let code = text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default();
        (code, text.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned())
    }

    pub fn create(&self, path: &str, object: &Value) {
        let (code, text) = self.send("POST", path, &object.to_string());
        assert_eq!(code, 201, "{text}");
    }

    /// The objects of a watch, each with the time at which it came. It begins with those that exist.
    pub fn watch(&self, path: &str) -> Receiver<(Value, Instant)> {
        let stream = self.request("GET", &format!("{path}?watch=1"), "");
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                let now = Instant::now();
                let Ok(mut event) = ferrite_json::from_str::<Value>(&line) else { continue };
                if sender.send((event["object"].take(), now)).is_err() {
                    return;
                }
            }
        });
        receiver
    }

    fn request(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }
}

pub fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

pub fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

/// The process of a pod's container: the one in the pod's control group that is not our supervisor.
pub fn container_process(pod: &Value) -> i32 {
    let uid = text(pod, "uid");
    let of_pod = |pid: &i32| {
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        groups.contains(uid) && !command.starts_with("ferrite-supervisor")
    };
    let processes = std::fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    ids.filter(of_pod).max().expect("the process of a pod that is ready")
}
