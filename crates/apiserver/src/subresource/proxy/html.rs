//! Pages on their way through the proxy: links in them are made to lead through it too.
//!
//! A page is rewritten as it passes. At most one tag is held back.

use super::links::Links;
use crate::http::{Body, BoxError};
use ::http::{HeaderMap, header};
use bytes::Bytes;
use flate2::write::{DeflateDecoder, MultiGzDecoder};
use http_body::Frame;
use http_body_util::BodyExt;
use std::io::Write;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// A tag longer than this passes as it is.
const TAG_MAX: usize = 16 << 10;

/// Attributes that hold a link, by tag; those that upstream knows.
const ATTRIBUTES: &[(&str, &[&str])] = &[
    ("a", &["href"]),
    ("applet", &["codebase"]),
    ("area", &["href"]),
    ("audio", &["src"]),
    ("base", &["href"]),
    ("blockquote", &["cite"]),
    ("body", &["background"]),
    ("button", &["formaction"]),
    ("command", &["icon"]),
    ("del", &["cite"]),
    ("embed", &["src"]),
    ("form", &["action"]),
    ("frame", &["longdesc", "src"]),
    ("head", &["profile"]),
    ("html", &["manifest"]),
    ("iframe", &["longdesc", "src"]),
    ("img", &["longdesc", "src", "usemap"]),
    ("input", &["src", "usemap", "formaction"]),
    ("ins", &["cite"]),
    ("link", &["href"]),
    ("object", &["classid", "codebase", "data", "usemap"]),
    ("q", &["cite"]),
    ("script", &["src"]),
    ("source", &["src"]),
    ("video", &["poster", "src"]),
];

/// Tags whose content is text until they are closed.
const TEXT_ONLY: &[&str] = &["iframe", "noembed", "noframes", "script", "style", "textarea", "title", "xmp"];

/// The compression of a page.
pub(super) enum Decoder {
    Plain,
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
    Deflate(Box<DeflateDecoder<Vec<u8>>>),
}

impl Decoder {
    /// None when the body is no page, or is packed in a way that nobody here can read.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let text = |name| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
        if text(header::CONTENT_TYPE).split(';').next()?.trim() != "text/html" {
            return None;
        }
        match text(header::CONTENT_ENCODING) {
            "" => Some(Self::Plain),
            "gzip" => Some(Self::Gzip(Box::new(MultiGzDecoder::new(Vec::new())))),
            "deflate" => Some(Self::Deflate(Box::new(DeflateDecoder::new(Vec::new())))),
            _ => None,
        }
    }

    fn decode(&mut self, data: &[u8]) -> std::io::Result<Vec<u8>> {
        let unpacked = match self {
            Self::Plain => return Ok(data.to_vec()),
            Self::Gzip(decoder) => {
                decoder.write_all(data)?;
                decoder.flush()?;
                decoder.get_mut()
            }
            Self::Deflate(decoder) => {
                decoder.write_all(data)?;
                decoder.flush()?;
                decoder.get_mut()
            }
        };
        Ok(std::mem::take(unpacked))
    }
}

/// The page with its links rewritten, unpacked.
pub(super) fn rewritten<B>(body: B, decoder: Decoder, links: Links) -> Body
where
    B: http_body::Body<Data = Bytes, Error = BoxError> + Send + 'static,
{
    Rewritten { body: body.boxed_unsync(), decoder, packed: Bytes::new(), page: Some(Page::new(links)) }
        .boxed_unsync()
}

/// Bytes of a page that are unpacked at once.
const UNPACKED_AT_ONCE: usize = 4096;

struct Rewritten {
    body: Body,
    decoder: Decoder,
    /// Arrived and not unpacked yet.
    packed: Bytes,
    /// Gone when the page has ended.
    page: Option<Page>,
}

impl http_body::Body for Rewritten {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        while let Some(page) = &mut this.page {
            if !this.packed.is_empty() {
                // A little becomes a thousand times as much: only so much is unpacked before the client takes it.
                let piece = this.packed.split_to(this.packed.len().min(UNPACKED_AT_ONCE));
                let out = page.feed(&this.decoder.decode(&piece)?);
                match out.is_empty() {
                    true => continue,
                    false => return Poll::Ready(Some(Ok(Frame::data(out.into())))),
                }
            }
            let out = match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    // Trailers say nothing about the page.
                    this.packed = frame.into_data().unwrap_or_default();
                    continue;
                }
                Some(Err(problem)) => return Poll::Ready(Some(Err(problem))),
                None => this.page.take().map(Page::finish).unwrap_or_default(),
            };
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
        Poll::Ready(None)
    }
}

/// A page rewritten as it arrives in pieces of `piece` bytes.
pub(crate) fn rewrite_page(html: &[u8], piece: usize) -> Vec<u8> {
    let mut page = Page::new(Links { prefix: "/p".into(), far: "10.0.0.1:80".into(), client: "api".into() });
    let mut out: Vec<u8> = html.chunks(piece.max(1)).flat_map(|piece| page.feed(piece)).collect();
    out.extend(page.finish());
    out
}

/// Where in a page we are.
#[derive(Clone, Copy)]
enum Inside {
    Markup,
    Comment,
    /// Content of a tag of [`TEXT_ONLY`].
    Text(&'static str),
}

struct Page {
    links: Links,
    inside: Inside,
    /// Read, but not understood to its end yet.
    held: Vec<u8>,
}

/// The meaning of the beginning of the held bytes.
enum Step {
    /// This number of bytes pass as they are.
    Pass(usize),
    /// This number of bytes are a tag.
    Tag(usize),
    /// More bytes are needed to decide.
    More,
}

impl Page {
    fn new(links: Links) -> Self {
        Self { links, inside: Inside::Markup, held: Vec::new() }
    }

    fn feed(&mut self, data: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(data);
        let mut out = Vec::with_capacity(self.held.len());
        let mut at = 0;
        loop {
            let rest = &self.held[at..];
            match step(rest, &mut self.inside) {
                Step::Pass(length) => {
                    out.extend_from_slice(&rest[..length]);
                    at += length;
                }
                Step::Tag(length) => {
                    rewrite_tag(&rest[..length], &self.links, &mut out);
                    at += length;
                }
                Step::More => break,
            }
        }
        self.held.drain(..at);
        out
    }

    /// The held bytes at the end of the page.
    fn finish(self) -> Vec<u8> {
        self.held
    }
}

fn step(rest: &[u8], inside: &mut Inside) -> Step {
    if rest.is_empty() {
        return Step::More;
    }
    match *inside {
        Inside::Comment => match find(rest, b"-->") {
            Some(at) => {
                *inside = Inside::Markup;
                Step::Pass(at + 3)
            }
            None => pass_all_but(rest, 2),
        },
        Inside::Text(tag) => {
            let close = format!("</{tag}");
            match find(rest, close.as_bytes()) {
                Some(at) => {
                    *inside = Inside::Markup;
                    Step::Pass(at + close.len())
                }
                None => pass_all_but(rest, close.len() - 1),
            }
        }
        Inside::Markup => markup(rest, inside),
    }
}

fn markup(rest: &[u8], inside: &mut Inside) -> Step {
    match rest.iter().position(|b| *b == b'<') {
        None => return Step::Pass(rest.len()),
        Some(0) => {}
        Some(at) => return Step::Pass(at),
    }
    if rest.starts_with(b"<!--") {
        *inside = Inside::Comment;
        return Step::Pass(4);
    }
    if b"<!--".starts_with(rest) {
        return Step::More;
    }
    if !rest[1].is_ascii_alphabetic() {
        return Step::Pass(1);
    }
    let Some(end) = tag_end(rest) else {
        return if rest.len() > TAG_MAX { Step::Pass(rest.len()) } else { Step::More };
    };
    let name = tag_name(&rest[..end]);
    if let Some(tag) = TEXT_ONLY.iter().find(|tag| name.eq_ignore_ascii_case(tag.as_bytes())) {
        *inside = Inside::Text(tag);
    }
    Step::Tag(end)
}

/// Passes all but `kept` bytes: the end mark may begin at the end of the held bytes.
fn pass_all_but(rest: &[u8], kept: usize) -> Step {
    if rest.len() > kept { Step::Pass(rest.len() - kept) } else { Step::More }
}

fn find(within: &[u8], what: &[u8]) -> Option<usize> {
    within.windows(what.len()).position(|window| window.eq_ignore_ascii_case(what))
}

/// The position behind the `>` that ends the tag; one within quotes does not.
fn tag_end(tag: &[u8]) -> Option<usize> {
    let mut quote = None;
    let mut value = false;
    for (at, byte) in tag.iter().enumerate() {
        match (quote, byte) {
            (Some(open), _) if byte == open => quote = None,
            (Some(_), _) => {}
            (None, b'>') => return Some(at + 1),
            (None, b'"' | b'\'') if value => quote = Some(byte),
            _ => {}
        }
        // A quote opens a value only right behind the equals sign.
        value = *byte == b'=' || (value && byte.is_ascii_whitespace());
    }
    None
}

fn tag_name(tag: &[u8]) -> &[u8] {
    let name = &tag[1..];
    let end = name.iter().position(|b| b.is_ascii_whitespace() || matches!(b, b'/' | b'>'));
    &name[..end.unwrap_or(name.len())]
}

/// Writes a tag out again, with other values where a link must change and otherwise byte by byte as it was.
fn rewrite_tag(tag: &[u8], links: &Links, out: &mut Vec<u8>) {
    let name = tag_name(tag);
    let known = ATTRIBUTES.iter().find(|(tag, _)| name.eq_ignore_ascii_case(tag.as_bytes()));
    let Some((_, wanted)) = known else { return out.extend_from_slice(tag) };
    let mut written = 0;
    let mut at = 1 + name.len();
    while let Some((key, value)) = attribute(tag, &mut at) {
        let is_link = wanted.iter().any(|w| tag[key.clone()].eq_ignore_ascii_case(w.as_bytes()));
        let Some(text) = std::str::from_utf8(&tag[value.clone()]).ok().filter(|_| is_link) else { continue };
        if let Some(link) = links.rewrite(text) {
            out.extend_from_slice(&tag[written..value.start]);
            out.extend_from_slice(escaped(&link).as_bytes());
            written = value.end;
        }
    }
    out.extend_from_slice(&tag[written..]);
}

/// The request chose the prefix: it must not get out of the attribute.
fn escaped(link: &str) -> String {
    link.replace('"', "%22").replace('\'', "%27").replace('<', "%3C").replace('>', "%3E")
}

type Range = std::ops::Range<usize>;

/// The next attribute's name and value; `at` moves behind it.
fn attribute(tag: &[u8], at: &mut usize) -> Option<(Range, Range)> {
    let skip = |from: usize, while_: fn(&u8) -> bool| {
        from + tag[from..].iter().position(|b| !while_(b)).unwrap_or(tag.len() - from)
    };
    let key = skip(*at, |b| b.is_ascii_whitespace() || *b == b'/');
    if key >= tag.len() || tag[key] == b'>' {
        return None;
    }
    // A name may begin with an equals sign, which keeps this from standing still.
    let key_end = skip(key + 1, |b| !b.is_ascii_whitespace() && !matches!(b, b'/' | b'>' | b'='));
    let equals = skip(key_end, u8::is_ascii_whitespace);
    if tag.get(equals) != Some(&b'=') {
        *at = key_end;
        return Some((key..key_end, key_end..key_end));
    }
    let value = skip(equals + 1, u8::is_ascii_whitespace);
    let range = match tag.get(value).copied() {
        Some(b'"') => value + 1..skip(value + 1, |b| *b != b'"'),
        Some(b'\'') => value + 1..skip(value + 1, |b| *b != b'\''),
        _ => value..skip(value, |b| !b.is_ascii_whitespace() && *b != b'>'),
    };
    let quoted = range.start != value;
    *at = (range.end + usize::from(quoted)).min(tag.len());
    Some((key..key_end, range))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_change_and_nothing_else_does() {
        for (html, expected) in [
            (r#"<a href="/x">/x</a>"#, r#"<a href="/p/x">/x</a>"#),
            (r#"<A class=b HREF = '/x' >"#, r#"<A class=b HREF = '/p/x' >"#),
            ("<img src=/x.png alt='a > b'/>", "<img src=/p/x.png alt='a > b'/>"),
            (
                r#"<a href="x"><a href="http://example.com/">"#,
                r#"<a href="x"><a href="http://example.com/">"#,
            ),
            (r#"<link href="http://10.0.0.1:80/s.css">"#, r#"<link href="/p/s.css">"#),
            (r#"<p href="/x" title="/y">"#, r#"<p href="/x" title="/y">"#),
            (r#"<!-- <a href="/x"> --><a href="/y">"#, r#"<!-- <a href="/x"> --><a href="/p/y">"#),
            (
                r#"<script src="/s.js">a = '<a href="/x">';</script><a href="/y">"#,
                r#"<script src="/p/s.js">a = '<a href="/x">';</script><a href="/p/y">"#,
            ),
            ("<title><a href='/x'></TITLE><q cite='/y'>", "<title><a href='/x'></TITLE><q cite='/p/y'>"),
            ("1 < 2 <a href=/>", "1 < 2 <a href=/p/>"),
            (
                r#"<input disabled src="/x" formaction="/y">"#,
                r#"<input disabled src="/p/x" formaction="/p/y">"#,
            ),
            ("<a =href=/x href", "<a =href=/x href"),
            ("<a href=\"/unclosed", "<a href=\"/unclosed"),
            ("<", "<"),
            ("<!-", "<!-"),
        ] {
            for piece in [1, 2, 3, 7, 1000] {
                let out = String::from_utf8(rewrite_page(html.as_bytes(), piece)).unwrap();
                assert_eq!(out, expected, "{html} in pieces of {piece}");
            }
        }
    }

    #[tokio::test]
    async fn a_page_that_unpacks_to_a_thousand_times_its_size_comes_in_pieces() {
        const SIZE: usize = 64 << 20;
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        for _ in 0..SIZE >> 20 {
            packer.write_all(&[b' '; 1 << 20]).unwrap();
        }
        let packed = Bytes::from(packer.finish().unwrap());
        assert!(packed.len() < SIZE / 500);
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, "text/html".parse().unwrap());
        headers.insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
        let links = Links { prefix: "/p".into(), far: String::new(), client: String::new() };
        let mut body = rewritten(crate::http::full(packed), Decoder::of(&headers).unwrap(), links);
        // Deflate makes at most 1032 bytes of one.
        let most = UNPACKED_AT_ONCE * 1032 + TAG_MAX;
        let mut total = 0;
        while let Some(frame) = body.frame().await {
            let length = frame.unwrap().into_data().unwrap().len();
            assert!(length <= most, "{length} bytes at once");
            total += length;
        }
        assert_eq!(total, SIZE);
    }

    #[test]
    fn an_endless_tag_is_not_waited_for() {
        let mut page = Page::new(Links { prefix: "/p".into(), far: String::new(), client: String::new() });
        let endless = [b"<a ".as_slice(), &[b'x'; TAG_MAX]].concat();
        assert_eq!(page.feed(&endless).len(), endless.len());
        assert!(page.held.is_empty());
    }
}
