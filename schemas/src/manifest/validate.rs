//! The rules between the parts of a manifest: unique names, known tensors, exact cover, alias groups, units and payload
//! ranges. What holds for one part alone is in `parts.rs`.

use std::collections::{HashMap, HashSet};

use super::cover::{CoverProblem, Region, check_cover};
use super::document::Document;
use super::error::ManifestError;
use super::parts::{ExtraFile, FRAGMENT_ALIGN_BYTES, Fragment, Tensor, check_file_path, volume_bytes};
use crate::affinity::affinity_id;
use crate::identity::{GroupId, RevisionIdentity};

/// Which fragments stand for which tensor, found while validating.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Lookup {
    /// Places of the tensors in order of their names.
    pub(super) by_name: Vec<u32>,
    /// For each tensor the one whose fragments hold its bytes: itself, or the first of its alias group.
    pub(super) stored_by: Vec<u32>,
    /// For each tensor where its own fragments begin in `fragments`; one more at the end.
    pub(super) starts: Vec<u32>,
    /// Places of the fragments, by tensor.
    pub(super) fragments: Vec<u32>,
}

impl Lookup {
    pub(super) fn tensor(&self, tensors: &[Tensor], name: &str) -> Option<usize> {
        let found = self.by_name.binary_search_by(|at| tensors[*at as usize].tensor_id.as_str().cmp(name)).ok()?;
        Some(self.by_name[found] as usize)
    }

    /// Places of the fragments that hold the bytes of the tensor at `tensor`.
    pub(super) fn fragments_of(&self, tensor: usize) -> &[u32] {
        let owner = self.stored_by[tensor] as usize;
        &self.fragments[self.starts[owner] as usize..self.starts[owner + 1] as usize]
    }
}

pub(super) fn validate(document: &Document) -> Result<Lookup, ManifestError> {
    for (place, tensor) in document.tensors.iter().enumerate() {
        tensor.check(&|field| format!("tensors[{place}].{field}"), document.version)?;
    }
    let mut lookup = index(document)?;
    check_fragments(document, &lookup)?;
    if document.version == 1 {
        lookup.stored_by = (0..document.tensors.len() as u32).collect();
        check_aliases_1(document)?;
        check_object_ranges_1(document)?;
    } else {
        check_keys(document)?;
        check_order(document)?;
        lookup.stored_by = check_aliases_2(document, &lookup)?;
        check_units(document)?;
    }
    check_covers(document, &lookup)?;
    Ok(lookup)
}

fn at_fragment(place: usize, field: &str, reason: impl Into<String>) -> ManifestError {
    ManifestError::new(format!("fragments[{place}].{field}"), reason)
}

/// Finds every fragment's tensor; names are unique.
fn index(document: &Document) -> Result<Lookup, ManifestError> {
    let tensors = &document.tensors;
    let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
    by_name.sort_unstable_by(|a, b| tensors[*a as usize].tensor_id.cmp(&tensors[*b as usize].tensor_id));
    for pair in by_name.windows(2) {
        let (first, second) = (pair[0] as usize, pair[1] as usize);
        if tensors[first].tensor_id == tensors[second].tensor_id {
            let path = format!("tensors[{}].tensor_id", first.max(second));
            return Err(ManifestError::new(path, format!("{:?} stands twice", tensors[first].tensor_id)));
        }
    }
    let mut lookup = Lookup { by_name, ..Lookup::default() };
    let mut ids = HashSet::with_capacity(document.fragments.len());
    let mut owners = Vec::with_capacity(document.fragments.len());
    let mut counts = vec![0_u32; tensors.len() + 1];
    for (place, fragment) in document.fragments.iter().enumerate() {
        if !ids.insert(fragment.fragment_id.as_str()) {
            return Err(at_fragment(place, "fragment_id", format!("{:?} stands twice", fragment.fragment_id)));
        }
        // Neighbours mostly belong to the same tensor or the next one.
        let Some(owner) = lookup.tensor(tensors, &fragment.tensor_id) else {
            return Err(at_fragment(place, "tensor_id", format!("{:?} is not in tensors", fragment.tensor_id)));
        };
        owners.push(owner as u32);
        counts[owner + 1] += 1;
    }
    for at in 1..counts.len() {
        counts[at] += counts[at - 1];
    }
    let mut next = counts.clone();
    lookup.fragments = vec![0; owners.len()];
    for (place, owner) in owners.into_iter().enumerate() {
        let slot = &mut next[owner as usize];
        lookup.fragments[*slot as usize] = place as u32;
        *slot += 1;
    }
    lookup.starts = counts;
    Ok(lookup)
}

/// What a fragment must keep with its tensor: rank, bounds (by the cover), byte size, alias list.
fn check_fragments(document: &Document, lookup: &Lookup) -> Result<(), ManifestError> {
    for (tensor_place, tensor) in document.tensors.iter().enumerate() {
        let own = &lookup.fragments[lookup.starts[tensor_place] as usize..lookup.starts[tensor_place + 1] as usize];
        for &place in own {
            let place = place as usize;
            let fragment = &document.fragments[place];
            let rank = tensor.global_shape.len();
            for (field, found) in
                [("global_offset", fragment.global_offset.len()), ("local_shape", fragment.local_shape.len())]
            {
                if found != rank {
                    return Err(at_fragment(
                        place,
                        field,
                        format!("has {found} dimensions, tensor {:?} has {rank}", tensor.tensor_id),
                    ));
                }
            }
            if document.version == 1 && fragment.local_shape.contains(&0) {
                return Err(at_fragment(place, "local_shape", "version 1 allows no empty fragment"));
            }
            let expected = volume_bytes(&fragment.local_shape, tensor.itemsize);
            if expected != Some(fragment.nbytes) {
                let expected = expected.map_or_else(|| "more than 64 bits".to_owned(), |bytes| bytes.to_string());
                let reason = format!("found {}, expected {expected} from local_shape and itemsize", fragment.nbytes);
                return Err(at_fragment(place, "nbytes", reason));
            }
            if fragment.object_offset.checked_add(fragment.nbytes).is_none() {
                return Err(at_fragment(place, "object_offset", "the fragment's end does not fit in 64 bits"));
            }
            let aliases = &fragment.aliases;
            if !aliases.is_empty() {
                if aliases.len() < 2 || !aliases.is_sorted_by(|a, b| a < b) {
                    return Err(at_fragment(
                        place,
                        "aliases",
                        "must be empty, or at least two names in ascending order",
                    ));
                }
                if aliases.binary_search(&fragment.tensor_id).is_err() {
                    return Err(at_fragment(place, "aliases", format!("must contain {:?}", fragment.tensor_id)));
                }
            }
        }
    }
    Ok(())
}

fn check_covers(document: &Document, lookup: &Lookup) -> Result<(), ManifestError> {
    let mut comparisons = 0;
    let mut regions = Vec::new();
    for (tensor_place, tensor) in document.tensors.iter().enumerate() {
        let places = lookup.fragments_of(tensor_place);
        regions.clear();
        regions.extend(places.iter().map(|place| {
            let fragment = &document.fragments[*place as usize];
            Region { offset: &fragment.global_offset, shape: &fragment.local_shape }
        }));
        check_cover(&tensor.global_shape, &regions, &mut comparisons).map_err(|problem| {
            let name = &tensor.tensor_id;
            match problem {
                CoverProblem::Outside(at) => at_fragment(
                    places[at] as usize,
                    "local_shape",
                    format!("reaches outside tensor {name:?} of shape {:?}", tensor.global_shape),
                ),
                CoverProblem::Overlap(first, second) => at_fragment(
                    places[second] as usize,
                    "global_offset",
                    format!("overlaps fragments[{}] of tensor {name:?}", places[first]),
                ),
                CoverProblem::Missing(elements) => ManifestError::new(
                    format!("tensors[{tensor_place}]"),
                    format!("fragments leave {elements} elements of {name:?} uncovered"),
                ),
                CoverProblem::TooMany => ManifestError::new(
                    format!("tensors[{tensor_place}]"),
                    format!("too many fragments of {name:?} to check their cover"),
                ),
            }
        })?;
    }
    Ok(())
}

/// Version 1: every member of an alias group has a fragment with the same geometry, size and group.
fn check_aliases_1(document: &Document) -> Result<(), ManifestError> {
    let mut members: HashMap<_, HashSet<&str>> = HashMap::new();
    for fragment in document.fragments.iter().filter(|fragment| !fragment.aliases.is_empty()) {
        let group = (&fragment.aliases, &fragment.global_offset, &fragment.local_shape, fragment.nbytes);
        members.entry(group).or_default().insert(&fragment.tensor_id);
    }
    let by_name: HashMap<&str, &Tensor> =
        document.tensors.iter().map(|tensor| (tensor.tensor_id.as_str(), tensor)).collect();
    for (place, fragment) in document.fragments.iter().enumerate().filter(|(_, fragment)| !fragment.aliases.is_empty())
    {
        let group = (&fragment.aliases, &fragment.global_offset, &fragment.local_shape, fragment.nbytes);
        if members.get(&group).is_none_or(|found| found.len() != fragment.aliases.len()) {
            return Err(at_fragment(place, "aliases", "a member of the group has no fragment with the same geometry"));
        }
        for alias in &fragment.aliases {
            let same = by_name.get(alias.as_str()).zip(by_name.get(fragment.tensor_id.as_str()));
            if !same.is_some_and(|(alias, own)| alias.is_alias_of(own)) {
                return Err(at_fragment(place, "aliases", format!("{alias:?} is unknown or has another descriptor")));
            }
        }
    }
    Ok(())
}

/// Version 1: ranges inside one object do not overlap.
fn check_object_ranges_1(document: &Document) -> Result<(), ManifestError> {
    let mut order: Vec<usize> = (0..document.fragments.len()).collect();
    let range = |at: &usize| (document.fragments[*at].object_key.as_str(), document.fragments[*at].object_offset);
    order.sort_unstable_by(|a, b| range(a).cmp(&range(b)));
    for pair in order.windows(2) {
        let (first, second) = (&document.fragments[pair[0]], &document.fragments[pair[1]]);
        if first.object_key == second.object_key && second.object_offset < first.object_offset + first.nbytes {
            return Err(at_fragment(
                pair[1],
                "object_offset",
                format!("overlaps fragments[{}] in {:?}", pair[0], first.object_key),
            ));
        }
    }
    Ok(())
}

/// Version 2: keys and group follow from the identity.
fn check_keys(document: &Document) -> Result<(), ManifestError> {
    let identity = RevisionIdentity::new(
        "default", // The tenant is not in the document and not in its keys.
        &document.namespace,
        &document.resource_id,
        &document.revision,
        document.weight_generation,
    )
    .map_err(|error| ManifestError::new("document", error.to_string()))?;
    let expected = identity.manifest_key();
    if document.manifest_key != expected {
        return Err(ManifestError::new(
            "manifest_key",
            format!("found {:?}, expected {expected:?}", document.manifest_key),
        ));
    }
    GroupId::try_from(document.group_id.clone()).map_err(|error| ManifestError::new("group_id", error.to_string()))?;
    let prefix = format!("{}/payload/", identity.key_base());
    let fragments = document.fragments.iter().map(|fragment| &fragment.object_key).enumerate();
    let files = document.files.iter().map(|file| &file.object_key).enumerate();
    for (list, place, key) in
        fragments.map(|(at, key)| ("fragments", at, key)).chain(files.map(|(at, key)| ("files", at, key)))
    {
        if key.len() <= prefix.len() || !key.starts_with(&prefix) {
            let path = format!("{list}[{place}].object_key");
            return Err(ManifestError::new(path, format!("found {key:?}, expected it to begin with {prefix:?}")));
        }
    }
    Ok(())
}

/// Version 2: one content has one document, so every list has one order.
fn check_order(document: &Document) -> Result<(), ManifestError> {
    let place = |unsorted: Option<usize>, list: &str, by: &str| match unsorted {
        Some(at) => Err(ManifestError::new(
            format!("{list}[{}]", at + 1),
            format!("out of order or repeated: {list} ascend by {by}"),
        )),
        None => Ok(()),
    };
    let unsorted = document.tensors.windows(2).position(|pair| pair[0].tensor_id >= pair[1].tensor_id);
    place(unsorted, "tensors", "tensor_id")?;
    fn key(fragment: &Fragment) -> (&str, &[u64], &[u64]) {
        (&fragment.tensor_id, &fragment.global_offset, &fragment.local_shape)
    }
    let unsorted = document.fragments.windows(2).position(|pair| key(&pair[0]) >= key(&pair[1]));
    place(unsorted, "fragments", "tensor_id, global_offset and local_shape")?;
    let unsorted = document.files.windows(2).position(|pair| pair[0].path >= pair[1].path);
    place(unsorted, "files", "path")?;
    let paths: HashSet<&str> = document.files.iter().map(|file| file.path.as_str()).collect();
    for (at, file) in document.files.iter().enumerate() {
        let wrong = |reason| ManifestError::new(format!("files[{at}].path"), reason);
        check_file_path(&file.path).map_err(wrong)?;
        let mut folders = file.path.match_indices('/').map(|(end, _)| &file.path[..end]);
        if let Some(folder) = folders.find(|folder| paths.contains(folder)) {
            return Err(wrong(format!("{folder:?} is a file and can not be a folder as well")));
        }
    }
    Ok(())
}

/// Version 2: an alias group is stored once, under its lowest name.
fn check_aliases_2(document: &Document, lookup: &Lookup) -> Result<Vec<u32>, ManifestError> {
    const NOBODY: u32 = u32::MAX;
    let tensors = &document.tensors;
    let mut stored_by = vec![NOBODY; tensors.len()];
    for owner in 0..tensors.len() {
        let own = &lookup.fragments[lookup.starts[owner] as usize..lookup.starts[owner + 1] as usize];
        let Some((&first, others)) = own.split_first() else { continue };
        let aliases = &document.fragments[first as usize].aliases;
        if let Some(&other) = others.iter().find(|place| &document.fragments[**place as usize].aliases != aliases) {
            return Err(at_fragment(
                other as usize,
                "aliases",
                format!("differ from fragments[{first}] of the same tensor"),
            ));
        }
        let wrong = |reason| Err(at_fragment(first as usize, "aliases", reason));
        if aliases.first().is_some_and(|lowest| *lowest != tensors[owner].tensor_id) {
            return wrong(format!("the group is stored under its lowest name {:?}, once", aliases[0]));
        }
        for name in aliases {
            match lookup.tensor(tensors, name) {
                Some(member) if member == owner => {}
                Some(member) if !tensors[member].is_alias_of(&tensors[owner]) => {
                    return wrong(format!("{name:?} has another descriptor than {:?}", tensors[owner].tensor_id));
                }
                Some(member) if stored_by[member] != NOBODY => return wrong(format!("{name:?} belongs to two groups")),
                Some(member) => stored_by[member] = owner as u32,
                None => return wrong(format!("{name:?} is not in tensors")),
            }
        }
        if stored_by[owner] != NOBODY {
            return wrong(format!("{:?} is stored twice", tensors[owner].tensor_id));
        }
        stored_by[owner] = owner as u32;
    }
    match stored_by.iter().position(|owner| *owner == NOBODY) {
        Some(place) => Err(ManifestError::new(
            format!("tensors[{place}]"),
            format!("no fragment stands for {:?}", tensors[place].tensor_id),
        )),
        None => Ok(stored_by),
    }
}

/// Version 2: units are numbered by their lowest tensor name, extra files last, and say what their members add up to.
fn check_units(document: &Document) -> Result<(), ManifestError> {
    let mut keys: Vec<&str> = Vec::with_capacity(document.units.len());
    let mut place = 0;
    for group in document.fragments.chunk_by(|a, b| a.tensor_id == b.tensor_id) {
        let first = &group[0];
        for (at, fragment) in group.iter().enumerate() {
            check_number(place + at, "fragments", fragment.unit, keys.len())?;
            if fragment.object_key != first.object_key {
                return Err(at_fragment(
                    place + at,
                    "object_key",
                    format!("differs from fragments[{place}] of the same unit"),
                ));
            }
            if fragment.object_offset % FRAGMENT_ALIGN_BYTES != 0 {
                return Err(at_fragment(
                    place + at,
                    "object_offset",
                    format!("is not a multiple of {FRAGMENT_ALIGN_BYTES}"),
                ));
            }
        }
        let names: Vec<&str> = match first.aliases.is_empty() {
            true => vec![&first.tensor_id],
            false => first.aliases.iter().map(String::as_str).collect(),
        };
        check_unit(
            document,
            keys.len(),
            &names,
            group.iter().map(|fragment| (fragment.object_offset, fragment.nbytes)),
        )?;
        keys.push(&first.object_key);
        place += group.len();
    }
    for (at, file) in document.files.iter().enumerate() {
        check_number(at, "files", file.unit, keys.len())?;
        if file.object_offset != 0 {
            return Err(ManifestError::new(
                format!("files[{at}].object_offset"),
                "must be 0: a file has a unit of its own",
            ));
        }
        check_unit(document, keys.len(), &ExtraFile::affinity_members(&file.path), [(0, file.nbytes)].into_iter())?;
        keys.push(&file.object_key);
    }
    if document.units.len() != keys.len() {
        return Err(ManifestError::new(
            "units",
            format!("found {}, the members make {}", document.units.len(), keys.len()),
        ));
    }
    keys.sort_unstable();
    match keys.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(ManifestError::new("units", format!("two units share the payload object {:?}", pair[0]))),
        None => Ok(()),
    }
}

fn check_number(place: usize, list: &str, found: u32, expected: usize) -> Result<(), ManifestError> {
    if found as usize == expected {
        return Ok(());
    }
    let reason =
        format!("found {found}, expected {expected}: units are numbered by lowest tensor name, then files by path");
    Err(ManifestError::new(format!("{list}[{place}].unit"), reason))
}

fn check_unit(
    document: &Document,
    number: usize,
    members: &[&str],
    ranges: impl Iterator<Item = (u64, u64)>,
) -> Result<(), ManifestError> {
    let Some(unit) = document.units.get(number) else {
        return Err(ManifestError::new("units", format!("unit {number} is missing")));
    };
    let wrong = |field: &str, reason: String| Err(ManifestError::new(format!("units[{number}].{field}"), reason));
    let expected = affinity_id(members);
    if unit.affinity_id != expected {
        return wrong("affinity_id", format!("found {}, expected {expected} from its members", unit.affinity_id));
    }
    let mut ranges: Vec<(u64, u64)> = ranges.filter(|(_, bytes)| *bytes > 0).collect();
    ranges.sort_unstable();
    let (mut end, mut logical) = (0, 0_u64);
    for (offset, bytes) in ranges {
        if offset < end {
            return wrong("extent_bytes", format!("two fragments overlap at byte {offset} of the unit"));
        }
        // Every fragment's end was checked to fit.
        end = offset + bytes;
        logical += bytes;
    }
    if unit.extent_bytes != end {
        return wrong("extent_bytes", format!("found {}, expected {end} from its members", unit.extent_bytes));
    }
    if unit.logical_bytes != logical {
        return wrong("logical_bytes", format!("found {}, expected {logical} from its members", unit.logical_bytes));
    }
    Ok(())
}
