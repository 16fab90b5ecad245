//! How the agent's library is linked.

/// The functions that the compiler calls by these names, and what the agent has in their place.
const OWN: [(&str, &str); 6] = [
    ("memcpy", "pageone_memcpy"),
    ("memmove", "pageone_memmove"),
    ("memset", "pageone_memset"),
    ("memcmp", "pageone_memcmp"),
    ("bcmp", "pageone_memcmp"),
    ("strlen", "pageone_strlen"),
];

fn main() {
    // Else a program's own would be taken, such as those of a sanitizer that is linked into it.
    for (name, own) in OWN {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--defsym={name}={own}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
