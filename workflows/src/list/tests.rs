use ballast_schemas::{Command, Component, ListRequest, RevisionIdentity, RevisionPage, TenantId};

use crate::testing::*;

fn request() -> ListRequest {
    ListRequest {
        namespace: None,
        resource_id: None,
        resource_prefix: None,
        revision: None,
        all: false,
        page_token: String::new(),
        limit: 100,
    }
}

fn component(text: &str) -> Option<Component> {
    Some(Component::new("part", text).unwrap())
}

/// Seven published revisions and an import in progress, of two tenants.
fn library() -> Log {
    let mut log = Log::new();
    let mut put = |tenant: &str, namespace: &str, resource: &str, revision: &str, generation, publish: bool| {
        let identity = RevisionIdentity::new(tenant, namespace, resource, revision, generation).unwrap();
        let mut command = begin(generation, hot());
        command.identity = identity.clone();
        let session = log.import(command);
        let mut manifest = manifest(generation);
        manifest.key = identity.manifest_key();
        manifest.group_id = identity.group_id();
        if publish {
            log.send(Command::CommitImport(commit(&session, manifest))).unwrap();
        }
    };
    for (resource, revision, generation) in [
        ("llama", "main", 1),
        ("llama", "main", 2),
        ("llama-chat", "dev", 9),
        ("llama-chat", "dev", 10),
        ("mistral", "main", 1),
    ] {
        put("default", "ns", resource, revision, generation, resource != "mistral");
    }
    put("default", "other", "llama", "main", 3, true);
    put("default", "other", "llama", "main", 4, false);
    put("zeta", "ns", "llama", "main", 1, true);
    log
}

fn names(page: &RevisionPage) -> Vec<String> {
    page.revisions.iter().map(|revision| revision.identity.to_string()).collect()
}

fn list(log: &Log, request: &ListRequest) -> RevisionPage {
    log.state.list(&TenantId::default_tenant(), request).unwrap()
}

#[test]
fn a_listing_is_in_order_and_leaves_out_imports_unless_asked() {
    let log = library();
    let page = list(&log, &request());
    let expected =
        ["ns/llama@main#1", "ns/llama@main#2", "ns/llama-chat@dev#9", "ns/llama-chat@dev#10", "other/llama@main#3"];
    assert_eq!((names(&page), page.next_page_token.as_str()), (expected.map(str::to_owned).to_vec(), ""));
    assert_eq!(list(&log, &ListRequest { all: true, ..request() }).revisions.len(), 7);
}

#[test]
fn every_filter_narrows_and_filters_combine() {
    let log = library();
    let count = |request: ListRequest| list(&log, &request).revisions.len();
    assert_eq!(count(ListRequest { namespace: component("ns"), ..request() }), 4);
    assert_eq!(count(ListRequest { namespace: component("n"), ..request() }), 0);
    assert_eq!(count(ListRequest { resource_id: component("llama"), ..request() }), 3);
    assert_eq!(count(ListRequest { namespace: component("ns"), resource_id: component("llama"), ..request() }), 2);
    assert_eq!(count(ListRequest { resource_prefix: Some("llama".into()), ..request() }), 5);
    assert_eq!(
        count(ListRequest { namespace: component("ns"), resource_prefix: Some("llama-".into()), ..request() }),
        2
    );
    assert_eq!(count(ListRequest { revision: component("main"), ..request() }), 3);
    assert_eq!(count(ListRequest { revision: component("main"), all: true, ..request() }), 5);
}

#[test]
fn pages_of_any_size_add_up_to_the_whole_without_repeats() {
    let log = library();
    for base in [
        request(),
        ListRequest { all: true, ..request() },
        ListRequest { resource_id: component("llama"), ..request() },
    ] {
        let whole = names(&list(&log, &base));
        for limit in 1..=8 {
            let mut pages = Vec::new();
            let mut next = ListRequest { limit, ..base.clone() };
            loop {
                let page = list(&log, &next);
                assert!(page.revisions.len() <= limit as usize);
                pages.extend(names(&page));
                if page.next_page_token.is_empty() {
                    break;
                }
                next.page_token = page.next_page_token;
            }
            assert_eq!(pages, whole, "limit {limit}");
        }
    }
}

#[test]
fn a_limit_of_none_or_too_many_and_a_token_that_no_page_gave_are_refused() {
    let log = library();
    let refused = |request: ListRequest| log.state.list(&TenantId::default_tenant(), &request).unwrap_err().to_string();
    assert!(refused(ListRequest { limit: 0, ..request() }).contains("limit is 0"));
    assert!(refused(ListRequest { limit: 1001, ..request() }).contains("1001"));
    for token in ["x", "a\u{1f}b\u{1f}c\u{1f}0", "a\u{1f}b\u{1f}c\u{1f}1\u{1f}2", "a\u{1f}b\u{1f}\u{1f}1"] {
        assert!(refused(ListRequest { page_token: token.into(), ..request() }).contains("page_token"), "{token:?}");
    }
}
