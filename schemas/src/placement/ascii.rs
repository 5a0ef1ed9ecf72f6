//! Placement documents and ids are canonical JSON in ASCII: characters outside it stand as `\uXXXX`, unlike in the
//! manifest, which keeps them raw. Only strings hold such characters, so the two forms convert as text.

use std::borrow::Cow;

use super::error::PlacementError;

/// Canonical JSON with raw characters, as the writer makes it, in its ASCII form.
pub(super) fn to_ascii(text: String) -> String {
    if text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return text;
    }
    let mut ascii = String::with_capacity(text.len() + 64);
    for char in text.chars() {
        if matches!(char, ' '..='~') {
            ascii.push(char);
            continue;
        }
        for unit in char.encode_utf16(&mut [0; 2]) {
            ascii.push_str(&format!("\\u{unit:04x}"));
        }
    }
    ascii
}

/// The way back, for the reader.
pub(super) fn from_ascii(bytes: &[u8]) -> Result<Cow<'_, str>, PlacementError> {
    let wrong = |at: usize, what: &str| PlacementError::new("document", format!("{what} at byte {at}"));
    if let Some(at) = bytes.iter().position(|byte| !matches!(byte, b' '..=b'~')) {
        return Err(wrong(at, "canonical form is printable ASCII, found another character"));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| wrong(error.valid_up_to(), "not UTF-8"))?;
    if !text.contains("\\u") {
        return Ok(Cow::Borrowed(text));
    }
    let unit_at = |at: usize| {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        let canonical = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        u16::from_str_radix(digits, 16).ok().filter(|_| canonical)
    };
    let mut raw = String::with_capacity(text.len());
    let mut at = 0;
    while let Some(found) = text[at..].find('\\') {
        raw.push_str(&text[at..at + found]);
        at += found;
        let Some(unit) = unit_at(at) else {
            // Another escape, which the reader judges; the character after the backslash is not one itself.
            let end = (at + 2).min(text.len());
            raw.push_str(&text[at..end]);
            at = end;
            continue;
        };
        if unit < 0x7f {
            raw.push_str(&text[at..at + 6]);
            at += 6;
            continue;
        }
        let units = [unit, unit_at(at + 6).unwrap_or(0)];
        match char::decode_utf16(units).next() {
            Some(Ok(char)) => {
                raw.push(char);
                at += 6 * char.len_utf16();
            }
            _ => return Err(wrong(at, "half of a surrogate pair")),
        }
    }
    raw.push_str(&text[at..]);
    Ok(Cow::Owned(raw))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn characters_outside_ascii_stand_as_utf_16_units() {
        assert_eq!(to_ascii("\"é\u{7f}😀\\n\"".to_owned()), "\"\\u00e9\\u007f\\ud83d\\ude00\\n\"");
        assert_eq!(from_ascii(b"\"\\\\u00e9\"").unwrap(), "\"\\\\u00e9\"", "a backslash and then text is no escape");
        assert!(from_ascii("\"é\"".as_bytes()).is_err());
        assert!(from_ascii(b"\"\\ud83d\"").is_err());
    }

    proptest! {
        #[test]
        fn every_json_text_comes_back(text in any::<String>()) {
            let json = serde_json::to_string(&text).unwrap();
            let ascii = to_ascii(json.clone());
            prop_assert!(ascii.is_ascii());
            prop_assert_eq!(from_ascii(ascii.as_bytes()).unwrap(), json);
        }
    }
}
