//! Images of a conversation: decoded for a model that sees them, or replaced by a sentence.
//!
//! An image that the model cannot see is an error in a new user message. In tool results and earlier messages, such an
//! image is replaced by a sentence, because an error would repeat with every later turn.
//!
//! New images are read first. An old URL that no longer answers cannot take their time.

use crate::http::{
    ApiError,
    layers::{MemoryPermit, RequestLog},
    models::LoadedModel,
    request::{
        ImagePart, ImageSource, ImageUrls, content_parts::BASE64, image_marker::ImageMarker, image_urls::ImageDownloads,
    },
};
use base64::Engine;
use moestro_chat::{Content, Message, Part, Role};
use moestro_engine::{Image, ImageProcessor, PlacedImage, place_images};
use moestro_model::error::ImageError;
use std::{mem, sync::Arc};

/// Maximum number of images that a request shows to the model. Older images are replaced by a sentence.
const MAX_IMAGES: usize = 16;
/// Maximum number of tokens of an image with `detail: low`.
const LOW_DETAIL_TOKENS: usize = 256;

/// Reason why an image is not shown to a model that reads text only. Completes "the image ...".
const BLIND: &str =
    "cannot be shown, because this model cannot see images; send text, or use a model with a vision tower";

/// Reason why an image is not shown. Completes "the image ...".
pub type NotShown = String;

/// A file that a step owns, so that its memory counts until the step ends, even if the client disconnects.
struct EncodedImage {
    bytes: Vec<u8>,
    /// The memory of a downloaded file. The permit of the request holds the memory of other files.
    _permit: Option<MemoryPermit>,
}

impl EncodedImage {
    /// A closure that calls this method owns the permit, too.
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl LoadedModel {
    /// Decodes the images of a conversation. Images that are not shown are replaced by sentences. `permit` grows by the
    /// bytes of the pixels.
    pub async fn decode_images(
        self: &Arc<Self>,
        permit: &mut MemoryPermit,
        mut messages: Vec<Message<ImagePart>>,
        urls: &Arc<ImageUrls>,
        log: Option<&RequestLog>,
    ) -> Result<Vec<Message<Arc<Image>>>, ApiError> {
        let processor = self.engine.images();
        let too_many = excess_images(&messages);
        let answered = messages.iter().rposition(|message| message.role == Role::Assistant).map_or(0, |last| last + 1);
        let too_many_before = excess_images(&messages[..answered]);
        let shown = read_images(processor, &mut messages, too_many, permit, urls).await?;
        let mut shown = shown.into_iter().enumerate();
        let mut decoded = Vec::with_capacity(messages.len());
        for (at_message, Message { role, content, reasoning, calls, extra }) in messages.into_iter().enumerate() {
            let mut decoded_content = content.is_some().then(Content::default);
            let mut separator = "";
            for part in content.into_iter().flat_map(|content| content.parts) {
                let content = decoded_content.get_or_insert_default();
                let image = match part {
                    Part::Text(text) => {
                        content.push_text(text, separator);
                        continue;
                    }
                    Part::Tool(name) => {
                        content.parts.push(Part::Tool(name));
                        continue;
                    }
                    Part::Image(image) => image,
                };
                separator = image.separator;
                let at = image.at;
                let Some((index, image)) = shown.next() else { continue };
                match image {
                    Ok(image) => content.parts.push(Part::Image(image)),
                    Err(why) => {
                        log.inspect(|log| log.add_image_not_shown());
                        // Each request of a conversation has its images again. The first one with an image logs it.
                        let is_dropped_now = processor.is_some() && (too_many_before..too_many).contains(&index);
                        if at_message < answered && !is_dropped_now {
                            tracing::debug!(at, why, "image replaced by a sentence, as before");
                        } else {
                            tracing::warn!(at, why, "image replaced by a sentence");
                        }
                        let sentence = match processor {
                            None => "[image not shown: this model cannot see images]".to_owned(),
                            Some(_) => format!("[image not shown: it {why}]"),
                        };
                        content.push_text(sentence, separator);
                    }
                }
            }
            decoded.push(Message { role, content: decoded_content, reasoning, calls, extra });
        }
        Ok(decoded)
    }

    /// The marker with which the images of these messages are rendered. `None` if there are no images.
    pub fn image_marker(&self, messages: &[Message<Arc<Image>>]) -> Option<ImageMarker> {
        messages.iter().flat_map(Message::images).next()?;
        let placeholder = self.tokenizer.token(self.engine.images()?.image_token)?;
        let has_placeholder = !placeholder.is_empty() && self.template.as_ref()?.contains(&placeholder);
        has_placeholder.then(|| ImageMarker::new(placeholder))
    }

    /// Replaces the placeholder of each image by as many placeholders as the image has tokens. `param` names the
    /// prompt in errors.
    pub fn place_images(
        &self,
        ids: Vec<u32>,
        images: Vec<Arc<Image>>,
        param: &str,
    ) -> Result<(Vec<u32>, Vec<PlacedImage>), ApiError> {
        let Some(processor) = self.engine.images().filter(|_| !images.is_empty()) else { return Ok((ids, Vec::new())) };
        let count = images.len();
        place_images(ids, &images, processor.image_token).ok_or_else(|| {
            let text =
                format!("The model's chat template does not write one placeholder for each of the {count} images.");
            ApiError::invalid(param, text)
        })
    }
}

/// Number of images that are not shown because there are too many.
fn excess_images(messages: &[Message<ImagePart>]) -> usize {
    messages.iter().flat_map(Message::images).count().saturating_sub(MAX_IMAGES)
}

/// Reads and decodes the images of a conversation: first those of new messages, then the others, the newest first. The
/// results have the order of the messages. The first `too_many` images are not shown. A new image that is not shown is an
/// error.
async fn read_images(
    processor: Option<&Arc<ImageProcessor>>,
    messages: &mut [Message<ImagePart>],
    too_many: usize,
    permit: &mut MemoryPermit,
    urls: &Arc<ImageUrls>,
) -> Result<Vec<Result<Arc<Image>, NotShown>>, ApiError> {
    let parts =
        messages.iter_mut().filter_map(|message| message.content.as_mut()).flat_map(|content| &mut content.parts);
    let images = parts.filter_map(|part| if let Part::Image(image) = part { Some(image) } else { None });
    let (new, mut earlier): (Vec<_>, Vec<_>) = images.enumerate().partition(|(_, image)| image.is_new);
    earlier.reverse();
    let mut downloads = ImageDownloads::new(urls.clone());
    let mut shown = Vec::with_capacity(new.len() + earlier.len());
    for (index, image) in new.into_iter().chain(earlier) {
        let read = match processor {
            None => Err(BLIND.to_owned()),
            Some(_) if index < too_many => Err(format!("is one of more than {MAX_IMAGES}")),
            Some(processor) => decode(processor.clone(), permit, image, &mut downloads).await?,
        };
        match read {
            Err(why) if image.is_new => {
                return Err(ApiError::invalid(&image.at, format!("{}: the image {why}.", image.at)));
            }
            read => shown.push((index, read)),
        }
    }
    shown.sort_by_key(|(index, _)| *index);
    Ok(shown.into_iter().map(|(_, read)| read).collect())
}

/// Reads and decodes one image, and takes its source. The inner error is the reason why the image is not shown. The outer
/// error ends the request.
async fn decode(
    processor: Arc<ImageProcessor>,
    permit: &mut MemoryPermit,
    part: &mut ImagePart,
    downloads: &mut ImageDownloads,
) -> Result<Result<Arc<Image>, NotShown>, ApiError> {
    let encoded = match mem::replace(&mut part.source, ImageSource::Invalid("was read")) {
        ImageSource::Invalid(why) => Err(why.to_owned()),
        // The permit holds the memory of the body's text, which the decoded copy uses.
        ImageSource::Base64(text) => {
            permit.run(0, move || decode_base64(text)).await?.map(|bytes| EncodedImage { bytes, _permit: None })
        }
        ImageSource::Url(url) => {
            let fetched = downloads.fetch(url, part.is_new, permit).await?;
            fetched.map(|(bytes, own)| EncodedImage { bytes, _permit: Some(own) })
        }
    };
    let encoded = match encoded {
        Ok(encoded) => encoded,
        Err(why) => return Ok(Err(why)),
    };
    // The header is read in a step, because the metadata of a large file takes long.
    let header_bytes = ImageProcessor::header_bytes(encoded.bytes());
    let reader = processor.clone();
    let header = move || Ok((reader.working_bytes(encoded.bytes())?, encoded));
    let (working, encoded) = match image_step(permit, header_bytes, header, |_| 0).await? {
        Ok(header) => header,
        Err(why) => return Ok(Err(why)),
    };
    let max_tokens = part.low_detail.then_some(LOW_DETAIL_TOKENS);
    let prepare = move || processor.prepare(encoded.bytes(), max_tokens);
    let image = image_step(permit, working, prepare, |image| image.pixels.data.len()).await?;
    Ok(image)
}

/// Runs a step of an image that needs `working` bytes, of which the permit keeps `kept`. An image that needs too much
/// memory even alone is not shown. If other requests hold the memory and run no step, or run steps for 30 s, the answer is
/// 503, and the client may retry.
async fn image_step<T: Send + 'static>(
    permit: &mut MemoryPermit,
    working: usize,
    step: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
    kept: impl FnOnce(&T) -> usize + Send + 'static,
) -> Result<Result<T, NotShown>, ApiError> {
    let kept = |output: &Result<T, ImageError>| output.as_ref().map_or(0, kept);
    match permit.run_and_keep(working, step, kept).await {
        Err(error) if error.status == 413 => Ok(Err(too_much_memory(working))),
        output => Ok(output?.map_err(|error| error.to_string())),
    }
}

/// Reason why an image is not shown that needs more memory than all requests have. Completes "the image ...".
pub fn too_much_memory(bytes: usize) -> NotShown {
    format!(
        "needs {} MiB of memory, more than the server has for requests; send a smaller one",
        bytes.div_ceil(1 << 20)
    )
}

/// Decodes base64, with or without line breaks and padding. Makes no copy of the text.
fn decode_base64(text: String) -> Result<Vec<u8>, NotShown> {
    let bytes = text.len() / 4 * 3;
    if bytes > ImageProcessor::MAX_ENCODED_BYTES {
        return Err(ImageError::Bytes { bytes, max: ImageProcessor::MAX_ENCODED_BYTES }.to_string());
    }
    let mut text = text.into_bytes();
    text.retain(|byte| !byte.is_ascii_whitespace());
    BASE64.decode(text).map_err(|_| "is not valid base64".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::layers::RequestMemory;
    use moestro_base::metrics::Metrics;
    use moestro_model::model::ImageLimits;
    use std::{
        io::{Read, Write},
        net::TcpListener,
        time::Duration,
    };

    #[test]
    fn base64_may_have_breaks_and_no_padding() {
        for text in ["aGk=", "aGk", "aG\nk=", " aGk=\r\n"] {
            assert_eq!(decode_base64(text.into()).unwrap(), b"hi", "{text:?}");
        }
        assert!(decode_base64("a*b".into()).is_err());
        assert!(decode_base64("A".repeat(40 << 20)).unwrap_err().contains("bytes"));
    }

    /// A host that sends this file once.
    fn host_of(file: Vec<u8>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", file.len());
            let _ = stream.write_all(&[head.as_bytes(), &file].concat());
        });
        host
    }

    #[tokio::test]
    async fn download_counts_until_its_step_ends() {
        const SIDE: u32 = 6000;
        let mut file = Vec::new();
        let encoder = image::codecs::png::PngEncoder::new(&mut file);
        let pixels = vec![0; (SIDE * SIDE) as usize];
        image::ImageEncoder::write_image(encoder, &pixels, SIDE, SIDE, image::ExtendedColorType::L8).unwrap();
        // Bytes after the image are ignored.
        file.extend(vec![0; 8 << 20]);
        let limits = ImageLimits { min_pixels: 4096, max_pixels: 65_536, factor: 32, mean: [0.5; 3], std: [0.5; 3] };
        let processor = Arc::new(ImageProcessor::new(limits, 0));
        let working = processor.working_bytes(&file).unwrap();
        let memory = RequestMemory::new(&Metrics::new("0", "cpu"));
        memory.set_plan(1 << 30);
        let len = file.len();
        let host = host_of(file);
        let mut part = ImagePart {
            source: ImageSource::Url(format!("http://{host}/")),
            low_detail: false,
            at: String::new(),
            is_new: true,
            separator: "",
        };
        let mut permit = memory.permit();
        let mut downloads = ImageDownloads::new(Arc::new(ImageUrls::new(&[host])));
        let decoding =
            tokio::spawn(async move { decode(processor, &mut permit, &mut part, &mut downloads).await.map(drop) });
        while memory.used() < working {
            assert!(!decoding.is_finished());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        decoding.abort();
        assert!(decoding.await.unwrap_err().is_cancelled());
        let used = memory.used();
        // A busy machine may have stopped this thread until the step has ended.
        assert!(used >= working + len || used == 0, "{used} bytes");
        while memory.used() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
