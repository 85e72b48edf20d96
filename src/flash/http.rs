use std::io::Read;
use std::time::Duration;

use futures_util::future::{LocalBoxFuture, ready};
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Agent, Body};

use super::{Bytes, Flash};
use crate::error::{Error, Result};

/// How often a request is tried whose connection failed.
const TRIES: u32 = 4;
/// Wait before the second try; each later one waits twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// Files below an address, read by range requests. A server that ignores ranges works too, slowly. Reads block.
pub struct HttpFlash {
    agent: Agent,
    /// Up to the last slash before the file's name, and the query that follows it.
    base: String,
    query: String,
}

impl HttpFlash {
    /// The pack at `url`: the address of its directory or of its `manifest.json`. A query is kept for every file.
    pub fn new(url: &str) -> HttpFlash {
        let url = url.split_once('#').map_or(url, |(before, _)| before);
        let (path, query) = url.find('?').map_or((url, ""), |at| url.split_at(at));
        let dir = path.strip_suffix("/manifest.json").unwrap_or(path).trim_end_matches('/');
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .build();
        HttpFlash { agent: config.into(), base: format!("{dir}/"), query: query.to_owned() }
    }

    fn url(&self, file: &str) -> String {
        format!("{}{file}{}", self.base, self.query)
    }

    fn get(&self, url: &str, range: &str) -> Result<Response<Body>, ureq::Error> {
        self.agent.get(url).header(header::RANGE, range).header(header::ACCEPT_ENCODING, "identity").call()
    }

    fn read_now(&self, file: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let url = self.url(file);
        let end = offset.saturating_add(len as u64);
        let short = |actual| Error::Truncated { path: url.clone(), expected: end, actual };
        retrying(&url, || {
            let response = self.get(&url, &format!("bytes={offset}-{}", end - 1))?;
            let (parts, body) = response.into_parts();
            let skip = match parts.status {
                StatusCode::PARTIAL_CONTENT => match content_range(&parts.headers) {
                    Some((Some(start), _)) if start == offset => 0,
                    Some((Some(_), total)) => return Ok(Err(short(total.unwrap_or(offset)))),
                    _ => return Ok(Err(odd_range(&url))),
                },
                StatusCode::OK => offset,
                StatusCode::RANGE_NOT_SATISFIABLE => {
                    let total = content_range(&parts.headers).and_then(|(_, total)| total);
                    return Ok(Err(short(total.unwrap_or(offset))));
                }
                status => return Ok(Err(Error::Http { url: url.clone(), status: status.as_u16() })),
            };
            let total = match skip {
                0 => content_range(&parts.headers).and_then(|(_, total)| total).or(body.content_length()),
                _ => body.content_length(),
            };
            let mut body = body.into_reader();
            let skipped = std::io::copy(&mut (&mut body).take(skip), &mut std::io::sink())?;
            // Grows with what arrives, not with what was asked for.
            let mut bytes = Vec::new();
            body.take(len as u64).read_to_end(&mut bytes)?;
            if skipped < skip || bytes.len() < len {
                // The end of the file, unless its length is known to be greater: then the connection broke.
                let actual = if skip > 0 { skipped + bytes.len() as u64 } else { offset + bytes.len() as u64 };
                if total.is_some_and(|total| total > actual && total >= end) {
                    return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
                }
                return Ok(Err(short(actual)));
            }
            Ok(Ok(bytes))
        })
    }

    fn size_now(&self, file: &str) -> Result<u64> {
        let url = self.url(file);
        retrying(&url, || {
            let head = self.agent.head(&url).header(header::ACCEPT_ENCODING, "identity").call()?;
            // Read from the header: a response without a body has a body of length zero.
            if let (StatusCode::OK, Some(length)) = (head.status(), content_length(head.headers())) {
                return Ok(Ok(length));
            }
            // Some servers refuse HEAD, or send no length with it.
            let response = self.get(&url, "bytes=0-0")?;
            Ok(match response.status() {
                StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                    content_range(response.headers()).and_then(|(_, total)| total).ok_or_else(|| odd_range(&url))
                }
                StatusCode::OK => match content_length(response.headers()) {
                    Some(length) => Ok(length),
                    None => Ok(std::io::copy(&mut response.into_body().into_reader(), &mut std::io::sink())?),
                },
                status => Err(Error::Http { url: url.clone(), status: status.as_u16() }),
            })
        })
    }
}

fn odd_range(url: &str) -> Error {
    let reason = "the server answered a range request without saying which bytes it sent".into();
    Error::Network { url: url.to_owned(), reason }
}

/// Calls `request` until it gets an answer, good or bad, or has failed [`TRIES`] times.
fn retrying<T>(url: &str, mut request: impl FnMut() -> Result<Result<T>, ureq::Error>) -> Result<T> {
    let mut wait = FIRST_WAIT;
    for _ in 1..TRIES {
        match request() {
            Ok(answer) => return answer,
            Err(reason @ (ureq::Error::BadUri(_) | ureq::Error::Http(_))) => {
                return Err(Error::Request(format!("`{url}` is not an address: {reason}")));
            }
            Err(reason) => tracing::warn!("{url}: {reason}; trying again"),
        }
        std::thread::sleep(wait);
        wait *= 2;
    }
    request().unwrap_or_else(|reason| Err(Error::Network { url: url.to_owned(), reason: reason.to_string() }))
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// First byte and size of the file from `bytes 5-9/100`, `bytes */100` or `bytes 5-9/*`.
fn content_range(headers: &HeaderMap) -> Option<(Option<u64>, Option<u64>)> {
    let (range, total) = headers.get(header::CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-').and_then(|(start, _)| start.trim().parse().ok()), total.trim().parse().ok()))
}

impl Flash for HttpFlash {
    fn read<'a>(&'a self, file: &'a str, offset: u64, len: usize) -> LocalBoxFuture<'a, Result<Bytes>> {
        Box::pin(ready(self.read_now(file, offset, len).map(Bytes::Owned)))
    }

    fn size<'a>(&'a self, file: &'a str) -> LocalBoxFuture<'a, Result<u64>> {
        Box::pin(ready(self.size_now(file)))
    }
}
