#!/usr/bin/env bash
# Builds libslowar with ggml's Vulkan backend as build/vulkan/lib/libslowar.so and installs Mesa's
# llvmpipe, a Vulkan device on any CPU. For Debian and its kin; `make test-vulkan` runs it, with
# CMake and Ninja on PATH. The argument is the build folder of `make lib`, whose ggml is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tree=build/vulkan
packages=(glslc libvulkan-dev mesa-vulkan-drivers spirv-headers)

# ggml wants vk::LayerSettingEXT, which bookworm's headers lack. Trixie's are the same on every
# processor.
headers_deb=libvulkan-dev_1.4.309.0-1_amd64.deb
headers_sha256=8d329d465e16168afff58b1bd0dd6db46aac2cc3f56054a481b25a04e90b345a

fail() {
    printf 'make test-vulkan: %s\n' "$1" >&2
    exit 1
}

have_packages() { dpkg --status "${packages[@]}" >/dev/null 2>&1; }

is_new_enough() { grep -qs LayerSettingEXT "$1/vulkan/vulkan_structs.hpp"; }

fetch_headers() {
    local mirror
    mirror="$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' | sed -n 1p)"
    [ -n "$mirror" ] || fail "apt knows no Debian mirror to fetch $headers_deb from; its lists come with 'apt-get update'. A newer libvulkan-dev that is installed does as well."
    # apt's own fetcher: it goes the way apt is set up to go, and checks the hash.
    /usr/lib/apt/apt-helper download-file "$mirror/pool/main/v/vulkan-loader/$headers_deb" \
        "$tree/$headers_deb" "SHA256:$headers_sha256"
    rm -rf "$tree/headers.new"
    dpkg-deb --extract "$tree/$headers_deb" "$tree/headers.new"
    mv "$tree/headers.new" "$tree/headers"
    rm "$tree/$headers_deb"
}

if ! have_packages; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        fail "it needs the packages ${packages[*]} (names of Debian and Ubuntu); install them, or run it as root where there is apt-get."
    apt-get -q update
    DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends "${packages[@]}"
fi

mkdir -p "$tree"
headers=/usr/include
if ! is_new_enough "$headers"; then
    headers="$PWD/$tree/headers/usr/include"
    is_new_enough "$headers" || fetch_headers
fi

# What cmake/ggml.cmake would unpack there: the same ggml need not be downloaded twice.
ln -sfn "$PWD/$1"/ggml-source-* "$tree/"
cmake -S . -B "$tree" -G Ninja -DGGML_VULKAN=ON -DVulkan_INCLUDE_DIR="$headers" >"$tree/configure.log" ||
    { cat "$tree/configure.log"; fail "CMake could not configure; its words are above."; }
CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" cmake --build "$tree" --target slowar
