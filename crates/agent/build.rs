//! How the agent's library is linked.

/// The functions that the compiler and std call by these names, and what the agent has in their place.
const OWN: [(&str, &str); 8] = [
    ("memcpy", "pageone_memcpy"),
    ("memmove", "pageone_memmove"),
    ("memset", "pageone_memset"),
    ("memcmp", "pageone_memcmp"),
    ("bcmp", "pageone_memcmp"),
    ("strlen", "pageone_strlen"),
    ("close", "pageone_close"),
    ("fcntl", "pageone_fcntl"),
];

fn main() {
    // Else a program's own would be taken, such as a sanitizer's. They may use thread-local storage, which the agent's thread has not.
    for (name, own) in OWN {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--defsym={name}={own}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
