//! Ways in for untrusted bytes that no request of a test reaches.

/// A page from the far side of a proxy, its links rewritten as it arrives in pieces of `piece` bytes.
pub fn page(html: &[u8], piece: usize) -> Vec<u8> {
    crate::subresource::rewrite_page(html, piece)
}
