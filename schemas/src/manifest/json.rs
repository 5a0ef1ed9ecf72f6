//! Canonical JSON, read and written: keys sorted, no white space, raw UTF-8, whole numbers only. The reader takes the
//! fields in their one legal order, so an unknown, missing, repeated or displaced field can not pass, and a document
//! that is read writes back as the same bytes. Which fields there are is `document.rs`'s matter.

use super::error::ManifestError;

/// One step of the path to the field that is being read.
enum Step {
    Object { fields: &'static [&'static str], at: Option<&'static str> },
    List { index: usize },
}

/// Reads one canonical document from front to back.
pub(crate) struct Reader<'a> {
    text: &'a str,
    at: usize,
    steps: Vec<Step>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, ManifestError> {
        let text = std::str::from_utf8(bytes)
            .map_err(|error| ManifestError::new("document", format!("not UTF-8 from byte {}", error.valid_up_to())))?;
        Ok(Self { text, at: 0, steps: Vec::new() })
    }

    /// Whether the document goes on with this text; nothing is consumed.
    pub(crate) fn sees(&self, text: &str) -> bool {
        self.rest().starts_with(text)
    }

    /// Opens an object with exactly these fields, given in canonical (sorted) order.
    pub(crate) fn open(&mut self, fields: &'static [&'static str]) -> Result<(), ManifestError> {
        self.take(b'{', "an object")?;
        self.steps.push(Step::Object { fields, at: None });
        Ok(())
    }

    /// Goes to the object's next field, which must be `name`.
    pub(crate) fn field(&mut self, name: &'static str) -> Result<(), ManifestError> {
        let first = matches!(self.steps.last(), Some(Step::Object { at: None, .. }));
        let mut at = self.at;
        let bytes = self.text.as_bytes();
        if !first {
            if bytes.get(at) != Some(&b',') {
                return Err(self.wrong_field(name));
            }
            at += 1;
        }
        let end = at + name.len() + 3;
        let fits = bytes.get(at..end).is_some_and(|key| {
            key.starts_with(b"\"") && key.ends_with(b"\":") && &key[1..=name.len()] == name.as_bytes()
        });
        if !fits {
            return Err(self.wrong_field(name));
        }
        self.at = end;
        if let Some(Step::Object { at, .. }) = self.steps.last_mut() {
            *at = Some(name);
        }
        Ok(())
    }

    /// Closes the object.
    pub(crate) fn close(&mut self) -> Result<(), ManifestError> {
        if self.next_byte() != Some(b'}') {
            return Err(self.wrong_field(""));
        }
        self.at += 1;
        self.steps.pop();
        Ok(())
    }

    /// Reads a list, one call of `item` for each element.
    pub(crate) fn list<T>(
        &mut self,
        at_most: usize,
        mut item: impl FnMut(&mut Self) -> Result<T, ManifestError>,
    ) -> Result<Vec<T>, ManifestError> {
        self.take(b'[', "a list")?;
        let mut items = Vec::new();
        if self.next_byte() == Some(b']') {
            self.at += 1;
            return Ok(items);
        }
        self.steps.push(Step::List { index: 0 });
        loop {
            if items.len() == at_most {
                self.steps.pop();
                return Err(self.error(format!("more than {at_most} elements")));
            }
            if let Some(Step::List { index }) = self.steps.last_mut() {
                *index = items.len();
            }
            items.push(item(self)?);
            match self.next_byte() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    self.steps.pop();
                    return Ok(items);
                }
                _ => return Err(self.unexpected("',' or ']'")),
            }
        }
    }

    /// Reads a whole number of 64 bits.
    pub(crate) fn number(&mut self) -> Result<u64, ManifestError> {
        let digits = self.rest().bytes().take_while(u8::is_ascii_digit).count();
        let text = &self.rest()[..digits];
        let follows = self.rest().as_bytes().get(digits);
        if digits == 0 {
            return Err(self.unexpected("a whole number"));
        }
        if matches!(follows, Some(b'.' | b'e' | b'E')) {
            return Err(self.error("found a number with a fraction or an exponent, expected a whole number"));
        }
        if digits > 1 && text.starts_with('0') {
            return Err(self.error("found a number with a leading zero"));
        }
        let value = text.parse().map_err(|_| self.error(format!("{text} does not fit in 64 bits")))?;
        self.at += digits;
        Ok(value)
    }

    /// Reads a whole number or null.
    pub(crate) fn optional_number(&mut self) -> Result<Option<u64>, ManifestError> {
        if self.sees("null") {
            self.at += 4;
            return Ok(None);
        }
        self.number().map(Some)
    }

    /// Reads a string that is not empty.
    pub(crate) fn string(&mut self) -> Result<String, ManifestError> {
        let text = self.any_string()?;
        if text.is_empty() { Err(self.error("is empty, expected a non-empty string")) } else { Ok(text) }
    }

    /// The document ends here.
    pub(crate) fn finish(&self) -> Result<(), ManifestError> {
        if self.at == self.text.len() {
            return Ok(());
        }
        Err(ManifestError::new("document", format!("{} bytes after its end", self.text.len() - self.at)))
    }

    /// An error at the field that was read last.
    pub(crate) fn error(&self, reason: impl Into<String>) -> ManifestError {
        ManifestError::new(self.path(), reason)
    }

    fn any_string(&mut self) -> Result<String, ManifestError> {
        self.take(b'"', "a string")?;
        let bytes = self.text.as_bytes();
        let start = self.at;
        while let Some(&byte) = bytes.get(self.at) {
            match byte {
                b'"' => {
                    let plain = &self.text[start..self.at];
                    self.at += 1;
                    return Ok(plain.to_owned());
                }
                b'\\' => return self.escaped_string(start),
                0..=0x1f => return Err(self.error(format!("holds an unescaped control character at byte {}", self.at))),
                _ => self.at += 1,
            }
        }
        Err(self.error("the document ends inside a string"))
    }

    /// The rest of a string from its first escape on. Only the escapes that the writer uses are canonical.
    fn escaped_string(&mut self, start: usize) -> Result<String, ManifestError> {
        let mut text = self.text[start..self.at].to_owned();
        loop {
            let rest = self.rest();
            let Some(next) = rest.chars().next() else {
                return Err(self.error("the document ends inside a string"));
            };
            match next {
                '"' => {
                    self.at += 1;
                    return Ok(text);
                }
                '\\' => {
                    let (char, bytes) = unescape(rest)
                        .ok_or_else(|| self.error(format!("a non-canonical escape at byte {}", self.at)))?;
                    text.push(char);
                    self.at += bytes;
                }
                '\0'..='\x1f' => {
                    return Err(self.error(format!("holds an unescaped control character at byte {}", self.at)));
                }
                other => {
                    text.push(other);
                    self.at += other.len_utf8();
                }
            }
        }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn next_byte(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn take(&mut self, byte: u8, what: &str) -> Result<(), ManifestError> {
        if self.next_byte() == Some(byte) {
            self.at += 1;
            return Ok(());
        }
        Err(self.unexpected(what))
    }

    fn unexpected(&self, expected: &str) -> ManifestError {
        let found = match self.next_byte() {
            None => "the end of the document".to_owned(),
            Some(b' ' | b'\n' | b'\r' | b'\t') => format!("white space at byte {} (canonical JSON has none)", self.at),
            Some(b'"') => "a string".to_owned(),
            Some(b'{') => "an object".to_owned(),
            Some(b'[') => "a list".to_owned(),
            Some(b'0'..=b'9') => "a number".to_owned(),
            Some(b'-') => "a negative number".to_owned(),
            Some(_) => {
                ["true", "false", "null", "NaN", "Infinity"].into_iter().find(|word| self.sees(word)).map_or_else(
                    || format!("{:?} at byte {}", self.rest().chars().next().unwrap_or(' '), self.at),
                    str::to_owned,
                )
            }
        };
        self.error(format!("found {found}, expected {expected}"))
    }

    /// Says why the next field is not `expected` (empty: the object's end).
    fn wrong_field(&mut self, expected: &str) -> ManifestError {
        let Some(Step::Object { fields, at }) = self.steps.pop() else {
            return self.error("not inside an object");
        };
        let missing = |name: &str| format!("field {name:?} is missing");
        let mut rest = self.rest();
        if at.is_some() {
            let Some(behind) = rest.strip_prefix(',') else {
                return match rest.bytes().next() {
                    Some(b'}') => self.error(missing(expected)),
                    _ => self.unexpected("',' or '}'"),
                };
            };
            rest = behind;
        }
        if rest.starts_with('}') {
            return self.error(missing(expected));
        }
        let Some(key) = rest.strip_prefix('"').and_then(|key| key.split_once('"')).map(|(key, _)| key) else {
            self.at = self.text.len() - rest.len();
            return self.unexpected("a field name");
        };
        let place = fields.iter().position(|field| *field == key);
        let last = at.and_then(|name| fields.iter().position(|field| *field == name));
        self.error(match (place, last) {
            (None, _) => format!("unknown field {key:?}"),
            (Some(place), Some(last)) if place <= last => format!("field {key:?} stands twice or out of order"),
            _ => missing(expected),
        })
    }

    fn path(&self) -> String {
        let mut path = String::new();
        for step in &self.steps {
            match step {
                Step::Object { at: Some(name), .. } => {
                    if !path.is_empty() {
                        path.push('.');
                    }
                    path.push_str(name);
                }
                Step::Object { at: None, .. } => {}
                Step::List { index } => {
                    path.push_str(&format!("[{index}]"));
                }
            }
        }
        if path.is_empty() { "document".to_owned() } else { path }
    }
}

/// The character of the canonical escape at the start of `text`, and the escape's length.
fn unescape(text: &str) -> Option<(char, usize)> {
    let short = match text.as_bytes().get(1)? {
        b'"' => '"',
        b'\\' => '\\',
        b'b' => '\x08',
        b'f' => '\x0c',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => {
            let code = u32::from_str_radix(text.get(2..6)?, 16).ok()?;
            let char = char::from_u32(code)?;
            let canonical = text[..6] == escape(char)?;
            return canonical.then_some((char, 6));
        }
        _ => return None,
    };
    Some((short, 2))
}

/// The canonical escape of a character that needs one.
fn escape(char: char) -> Option<String> {
    Some(match char {
        '"' => "\\\"".to_owned(),
        '\\' => "\\\\".to_owned(),
        '\x08' => "\\b".to_owned(),
        '\x0c' => "\\f".to_owned(),
        '\n' => "\\n".to_owned(),
        '\r' => "\\r".to_owned(),
        '\t' => "\\t".to_owned(),
        '\0'..='\x1f' => format!("\\u{:04x}", u32::from(char)),
        _ => return None,
    })
}

/// Writes one canonical document. The caller gives the fields in sorted order.
#[derive(Default)]
pub(crate) struct Writer {
    text: String,
}

impl Writer {
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self { text: String::with_capacity(bytes) }
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.text.into_bytes()
    }

    pub(crate) fn into_text(self) -> String {
        self.text
    }

    pub(crate) fn open(&mut self) {
        self.text.push('{');
    }

    pub(crate) fn close(&mut self) {
        self.text.push('}');
    }

    pub(crate) fn field(&mut self, name: &str) {
        if !self.text.ends_with('{') {
            self.text.push(',');
        }
        self.text.push('"');
        self.text.push_str(name);
        self.text.push_str("\":");
    }

    pub(crate) fn list<T>(&mut self, items: impl IntoIterator<Item = T>, mut item: impl FnMut(&mut Self, T)) {
        self.text.push('[');
        for (index, value) in items.into_iter().enumerate() {
            if index > 0 {
                self.text.push(',');
            }
            item(self, value);
        }
        self.text.push(']');
    }

    pub(crate) fn number(&mut self, value: u64) {
        let mut digits = [0_u8; 20];
        let mut at = digits.len();
        let mut rest = value;
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.text.extend(digits[at..].iter().map(|digit| char::from(*digit)));
    }

    pub(crate) fn optional_number(&mut self, value: Option<u64>) {
        match value {
            Some(value) => self.number(value),
            None => self.text.push_str("null"),
        }
    }

    pub(crate) fn string(&mut self, value: &str) {
        self.text.push('"');
        let mut plain = 0;
        for (at, byte) in value.bytes().enumerate() {
            if !matches!(byte, b'"' | b'\\' | 0..=0x1f) {
                continue;
            }
            self.text.push_str(&value[plain..at]);
            if let Some(escape) = escape(char::from(byte)) {
                self.text.push_str(&escape);
            }
            plain = at + 1;
        }
        self.text.push_str(&value[plain..]);
        self.text.push('"');
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read_string(text: &str) -> Result<String, ManifestError> {
        let mut reader = Reader::new(text.as_bytes())?;
        let value = reader.any_string()?;
        reader.finish().map(|()| value)
    }

    #[test]
    fn only_the_canonical_escape_of_a_character_is_read() {
        assert_eq!(read_string(r#""a\n\u0001\"é""#).unwrap(), "a\n\u{1}\"é");
        for wrong in [
            r#""\u000a""#,
            r#""\u001F""#,
            r#""\/""#,
            r#""\u00e9""#,
            r#""\ud83d\ude00""#,
            r#""\u+041""#,
            r#""\"#,
            "\"\n\"",
        ] {
            assert!(read_string(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn every_string_reads_back_and_is_written_as_other_json_writers_do(text in any::<String>()) {
            let mut writer = Writer::default();
            writer.string(&text);
            prop_assert_eq!(&writer.text, &serde_json::to_string(&text).unwrap());
            prop_assert_eq!(read_string(&writer.text).unwrap(), text);
        }

        #[test]
        fn every_number_reads_back(value in any::<u64>()) {
            let mut writer = Writer::default();
            writer.number(value);
            prop_assert_eq!(&writer.text, &value.to_string());
            prop_assert_eq!(Reader::new(writer.text.as_bytes()).unwrap().number().unwrap(), value);
        }
    }
}
