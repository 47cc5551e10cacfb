//! The dictionary SPDY/3 primes its header compression with: a constant of the protocol.

/// Words with their length before them.
const WORDS: &[&str] = &[
    "options",
    "head",
    "post",
    "put",
    "delete",
    "trace",
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "accept-ranges",
    "age",
    "allow",
    "authorization",
    "cache-control",
    "connection",
    "content-base",
    "content-encoding",
    "content-language",
    "content-length",
    "content-location",
    "content-md5",
    "content-range",
    "content-type",
    "date",
    "etag",
    "expect",
    "expires",
    "from",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-modified",
    "location",
    "max-forwards",
    "pragma",
    "proxy-authenticate",
    "proxy-authorization",
    "range",
    "referer",
    "retry-after",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "vary",
    "via",
    "warning",
    "www-authenticate",
    "method",
    "get",
    "status",
    "200 OK",
    "version",
    "HTTP/1.1",
    "url",
    "public",
    "set-cookie",
    "keep-alive",
    "origin",
];

/// Values that follow without lengths.
const VALUES: &str = concat!(
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 N",
    "on-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized4",
    "03 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan",
    " Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTch",
    "unked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,",
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,en",
    "q=0.",
);

/// The dictionary as bytes.
pub fn dictionary() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1423);
    for word in WORDS {
        bytes.extend((word.len() as u32).to_be_bytes());
        bytes.extend(word.as_bytes());
    }
    bytes.extend(VALUES.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The checksum every SPDY/3 peer puts at the start of its first header block.
    #[test]
    fn is_the_one_peers_use() {
        let bytes = dictionary();
        let (a, b) = bytes.iter().fold((1u32, 0u32), |(a, b), byte| {
            let a = (a + u32::from(*byte)) % 65521;
            (a, (b + a) % 65521)
        });
        assert_eq!((bytes.len(), b << 16 | a), (1423, 0xe3c6_a7c2));
    }
}
